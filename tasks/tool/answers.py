"""What another model answers, for the same questions, from an agent's evidence and from the passages of a plain search.

R-Search Section 5.1 (arXiv 2506.04185; docs/methods/r_search.md)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks import text
from tasks.records.read_answers import ReadAnswer
from tasks.retrieval import Retriever, search_again
from tasks.services import Reader
from tasks.tool.agent import EvidenceAgent
from tasks.tool.gains import EVIDENCE, PASSAGES_READ, plain
from tasks.types import Question

COUNTS = (1, 3, 5)
"""Passages of the plain searches."""


def sources(
    questions: Sequence[Question],
    agent: EvidenceAgent,
    search: Retriever,
    counts: Sequence[int] = COUNTS,
    show: Callable[[int], None] = lambda done: None,
) -> dict[str, list[str]]:
    """What the model gets to read for each question, by source.

    Args:
        questions: what is asked.
        agent: writes evidence.
        search: finds passages for the question itself.
        counts: passages of the plain searches, one source each.
        show: called with the number of questions that are done.

    Raises:
        RetrievalError: a search failed, or the agent cannot take a question.
    """
    read: dict[str, list[str]] = {source: [] for source in (*map(plain, counts), EVIDENCE, PASSAGES_READ)}
    size = agent.system.batch_questions
    for first in range(0, len(questions), size):
        asked = [question.question for question in questions[first : first + size]]
        for hits in search_again(search, asked, max(counts)):
            for count in counts:
                read[plain(count)].append(_joined(hits[:count]))
        for one in agent.find(asked):
            read[EVIDENCE].append(one.evidence)
            read[PASSAGES_READ].append(_joined(one.passages))
        show(first + len(asked))
    return read


def _joined(hits: Sequence[Any]) -> str:
    return " ".join(hit.text for hit in hits)


def answered(questions: Sequence[Question], read: Mapping[str, Sequence[str]], reader: Reader) -> list[ReadAnswer]:
    """The model's answers and their scores, source by source; without anything to read there is no answer.

    Raises:
        ServiceError: the model cannot answer now.
    """
    rows = []
    for source, texts in read.items():
        pairs = [(question.question, one) for question, one in zip(questions, texts, strict=True) if one]
        replies = dict(zip(pairs, reader.answers(pairs), strict=True))
        for question, one in zip(questions, texts, strict=True):
            answer = replies.get((question.question, one))
            em, f1 = text.exact_match(answer, question.answers), text.f1(answer, question.answers)
            rows.append(
                ReadAnswer(
                    question_id=question.id, hops=question.hops, source=source, answer=answer, em=float(em), f1=f1
                )
            )
    return rows
