"""Wrong answers by kind: how many of each a system gives, and a sample to read.

The kinds are those of `tasks.evaluate.errors`. Greedy play alone is counted, all seeds together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.data.records import read_questions
from tasks.evaluate.errors import KINDS, Kind, kind_of
from tasks.records.scores import ScoreRow
from tasks.report.artifacts import Run
from tasks.report.table import Results, Section
from tasks.store import DataError, Row, digest
from tasks.types import Question

NUM_SAMPLED = 20
"""Errors of each system that the page lists."""

Played = tuple[int, str]
"""(seed, question id) of a greedy play of one system."""


@dataclass(frozen=True)
class Error:
    """One wrong answer: who gave it, its scores and its kind."""

    policy: str
    seed: int
    score: ScoreRow
    kind: Kind


def name(kind: str) -> str:
    """The words for a kind."""
    return kind.replace("_", " ")


def found(runs: Sequence[Run], policy: str) -> list[Error]:
    """Every wrong greedy answer of a system."""
    return [
        Error(policy, run.seed, row, kind)
        for run in runs
        if run.policy == policy
        for row in run.scores["greedy"]
        if (kind := kind_of(row)) is not None
    ]


def counts(results: Results) -> dict[str, dict[str, int]]:
    """System -> kind -> wrong answers of all seeds; every kind is there."""
    counted = {policy: Counter(error.kind for error in found(results.runs, policy)) for policy in results.policies}
    return {policy: {kind: own[kind] for kind in KINDS} for policy, own in counted.items()}


def section(results: Results) -> Section:
    """One line a system: answers, wrong ones, and of these each kind that any system has, with its share."""
    counted = counts(results)
    shown = [kind for kind in KINDS if any(own[kind] for own in counted.values())]
    num_answers = len(results.seeds) * len(results.runs[0].scores["greedy"])
    rows = []
    for policy, own in counted.items():
        wrong = sum(own.values())
        shares = [f"{own[kind]:,} ({own[kind] / wrong:.3f})" if own[kind] else "0" for kind in shown]
        rows.append([results.title(policy), f"{num_answers:,}", f"{wrong:,}", *shares])
    meanings = "; ".join(f"{name(kind)}: {KINDS[kind]}" for kind in shown)
    lead = f"Wrong answers in greedy play, all seeds together, with their share of the wrong ones. {meanings}."
    return Section("errors", "Errors by kind", lead, ["policy", "answers", "wrong", *map(name, shown)], rows)


def sample(errors: Sequence[Error], recorded: Collection[Played], limit: int = NUM_SAMPLED) -> list[Error]:
    """At most `limit` errors of one system, one of each kind in turn, in the order of the kinds.

    The order within a kind is that of a hash of question and seed, so the same errors give the same sample. Plays with
    a recorded trajectory go first: they are spread evenly over the questions, whatever was answered. So do other
    questions before other seeds of the same. After one of each kind those that cannot be read wait for all that can.
    """

    def is_recorded(error: Error) -> bool:
        return (error.seed, error.score.question_id) in recorded

    def order(error: Error) -> tuple[bool, str]:
        return not is_recorded(error), digest("error", error.score.question_id, error.seed)

    queues = {kind: _varied(sorted((e for e in errors if e.kind == kind), key=order)) for kind in KINDS}
    drawn: dict[str, list[Error]] = {kind: [] for kind in KINDS}
    left = min(limit, len(errors))
    while left:
        waits = any(drawn.values()) and any(queue and is_recorded(queue[0]) for queue in queues.values())
        for kind, queue in queues.items():
            if queue and left and (is_recorded(queue[0]) or not waits):
                drawn[kind].append(queue.pop(0))
                left -= 1
    return [error for own in drawn.values() for error in own]


def _varied(errors: Sequence[Error]) -> list[Error]:
    """The same errors, with those of a question that came before at the end: seeds often fail alike."""
    first: dict[str, Error] = {}
    for error in errors:
        first.setdefault(error.score.question_id, error)
    return [*first.values(), *(error for error in errors if first[error.score.question_id] is not error)]


def example_rows(samples: Sequence[Error], questions: Path, recorded: dict[str, set[Played]]) -> Iterator[Row]:
    """What the page shows of sampled errors; reads the texts of their questions.

    Args:
        samples: of all systems.
        questions: `questions.jsonl`.
        recorded: system -> plays with a recorded trajectory.

    Raises:
        DataError: the file is malformed, or lacks a question.
    """
    texts = _questions(questions, {error.score.question_id for error in samples})
    for error in samples:
        score, question = error.score, texts[error.score.question_id]
        yield {
            "policy": error.policy,
            "seed": error.seed,
            "question_id": score.question_id,
            "dataset": score.dataset,
            "hops": score.hops,
            "kind": error.kind,
            "question": question.question,
            "answers": list(question.answers[:5]),
            "answer": score.answer,
            "searches": score.searches,
            "is_recorded": (error.seed, score.question_id) in recorded[error.policy],
        }


def _questions(path: Path, wanted: set[str]) -> dict[str, Question]:
    texts = {question.id: question for question in read_questions(path) if question.id in wanted}
    if missing := sorted(wanted - texts.keys()):
        raise DataError(
            f"{path}: question {missing[0]!r} is missing, which an evaluation played. Run `dvc repro` to bring the "
            "evaluation up to date."
        )
    return texts
