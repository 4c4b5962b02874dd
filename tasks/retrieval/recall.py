"""Measures a retriever on questions with known gold passages: recall of these, and answers in passages.

The query is the question itself, so the figures describe an agent whose first search repeats the question.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from tasks.retrieval import Progress, Retriever, search_again, silent
from tasks.text import contains_any, findable, normalize
from tasks.types import Hit, Question

Row = dict[str, float]
_BATCH = 128
_ALL_GOLD = 10


def recall_table(
    questions: Iterable[Question],
    retriever: Retriever,
    ks: tuple[int, ...] = (3, 5, 10),
    progress: Progress = silent,
) -> dict[str, dict[str, float | int]]:
    """Search every question once and average per dataset.

    A dataset with `gold_complete` questions is measured on those: `recall@k`, the mean share of a
    question's gold passages among the first k, and `all_gold@10`, the share of questions whose gold is
    complete in the first 10. A dataset without any is measured on all its questions and has no such keys.
    Both have `num_questions` and `answer@k`, the share of questions for which one of the first k passages
    (title or text) holds an answer as whole words after normalisation.

    Returns:
        `{dataset: {name: value}}`, datasets in order of name, shares in [0, 1].
    """
    return {name: _mean(rows) for name, rows in question_rows(questions, retriever, ks, progress).items()}


def holds(hit: Hit, answers: Iterable[str]) -> bool:
    """Whether title or text of a passage has one of these normalised answers as whole words."""
    return contains_any(f"{hit.title} {hit.text}", answers)


def answered(
    questions: Iterable[Question], retriever: Retriever, k: int, progress: Progress = silent
) -> list[Question]:
    """The questions for which one of the first `k` passages holds an answer, in order.

    Left out are questions whose answers stand in most passages by chance (`tasks.text.findable`).
    """
    found: list[Question] = []
    for batch in _batches(progress(questions, None, "searching questions")):
        results = search_again(retriever, [question.question for question in batch], k)
        for question, hits in zip(batch, results, strict=True):
            answers = findable(question.answers)
            if any(holds(hit, answers) for hit in hits):
                found.append(question)
    return found


def question_rows(
    questions: Iterable[Question],
    retriever: Retriever,
    ks: tuple[int, ...] = (3, 5, 10),
    progress: Progress = silent,
    groups: Callable[[Question], tuple[str, ...]] = lambda question: (question.dataset,),
) -> dict[str, list[Row]]:
    """The figures of every question behind `recall_table`, in the order of the questions.

    `groups` gives the groups in which a question counts; the default is its dataset.
    """
    depth = max(*ks, _ALL_GOLD)
    every: dict[str, list[Row]] = defaultdict(list)
    with_gold: dict[str, list[Row]] = defaultdict(list)
    for batch in _batches(progress(questions, None, "searching questions")):
        results = search_again(retriever, [question.question for question in batch], depth)
        for question, hits in zip(batch, results, strict=True):
            row = {f"answer@{k}": float(answered) for k, answered in _answered(question, hits, ks)}
            if question.gold_complete:
                found = {hit.passage_id: rank for rank, hit in reversed(list(enumerate(hits)))}
                ranks = [found.get(passage_id, depth) for passage_id in question.gold_passage_ids]
                row |= {f"recall@{k}": sum(rank < k for rank in ranks) / len(ranks) for k in ks}
                row[f"all_gold@{_ALL_GOLD}"] = float(all(rank < _ALL_GOLD for rank in ranks))
            for name in groups(question):
                every[name].append(row)
                if question.gold_complete:
                    with_gold[name].append(row)
    return {name: with_gold.get(name) or rows for name, rows in sorted(every.items())}


def _batches(questions: Iterable[Question]) -> Iterator[list[Question]]:
    questions = iter(questions)
    while batch := list(itertools.islice(questions, _BATCH)):
        yield batch


def _answered(question: Question, hits: list[Hit], ks: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
    answers = [f" {answer} " for answer in map(normalize, question.answers) if answer]
    passages = (_normal(hit.title, hit.text) for hit in hits)
    first = next((rank for rank, text in enumerate(passages) if any(a in text for a in answers)), None)
    for k in ks:
        yield k, first is not None and first < k


@functools.lru_cache(maxsize=20_000)
def _normal(title: str, text: str) -> str:
    return f" {normalize(f'{title} {text}')} "


def _mean(rows: list[Row]) -> dict[str, float | int]:
    means = {name: round(sum(row[name] for row in rows) / len(rows), 6) for name in sorted(rows[0])}
    return {"num_questions": len(rows), **means}
