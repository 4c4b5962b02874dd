"""A question's decomposition as it can be searched: `#1`, `#2` replaced by the answers they stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.types import Hop, Question

REFERENCE = re.compile(r"#(\d+)")
RELATION = " >> "
"""Stands between subject and relation where a dataset writes a hop as a triple without its object."""


def hops_of(question: Question) -> list[Hop]:
    """The decomposition with `#k` resolved; one hop that searches the question itself where there is none."""
    hops = question.decomposition or (Hop(question.question, question.answers[0]),)
    answers = [hop.answer for hop in hops]
    return [
        Hop(
            question=_resolve(hop.question, answers),
            answer=hop.answer,
            support_passage_id=hop.support_passage_id,
            queries=tuple(_resolve(query, answers) for query in _queries(hop)),
        )
        for hop in hops
    ]


def _queries(hop: Hop) -> tuple[str, ...]:
    return hop.queries or (hop.question.replace(RELATION, " "),)


def _resolve(text: str, answers: Sequence[str]) -> str:
    def answer(match: re.Match[str]) -> str:
        number = int(match[1])
        return answers[number - 1] if 1 <= number <= len(answers) else match[0]

    return REFERENCE.sub(answer, text)
