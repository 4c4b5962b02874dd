"""Labels played trajectories: asks the labeller, leaves out what it cannot label, and counts that by reason."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.records.played import LabelRow, PlayedRow, PlayedTurn
from tasks.services import Labeller, StepLabels
from tasks.types import Action, Hop, Question, Turn


@dataclass
class Counts:
    """What was read, kept and dropped; `dropped` by reason."""

    read: int = 0
    kept: int = 0
    right: int = 0
    searches: int = 0
    pivots: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**vars(self), "dropped": dict(sorted(self.dropped.items()))}


def label(
    played: Iterable[PlayedRow], hops: Mapping[str, tuple[Hop, ...]], labeller: Labeller, counts: Counts
) -> Iterator[LabelRow]:
    """The labelled rows, in order.

    A play whose search failed is dropped before it is labelled. One with unusable labels, or with another number of
    them than of searches, is dropped after it.

    Args:
        played: rows of trajectories.
        hops: question id -> golden hops, without any `#k`.
        labeller: says which searches are pivots.
        counts: is added to.
    """
    waiting: deque[PlayedRow] = deque()

    def asked() -> Iterator[tuple[Question, Sequence[Turn]]]:
        for row in played:
            counts.read += 1
            if row.status == "failed":
                counts.dropped["search_failed"] += 1
                continue
            waiting.append(row)
            yield question_of(row, hops[row.question_id]), [turn_of(turn) for turn in row.turns]

    for found in labeller.label(asked()):
        row = waiting.popleft()
        if reason := _fault(row, found):
            counts.dropped[reason] += 1
            continue
        yield _labelled(row, found, hops[row.question_id], counts)


def question_of(row: PlayedRow, hops: tuple[Hop, ...]) -> Question:
    """The question of a row with its golden hops."""
    return Question(row.question_id, "played", "train", row.question, tuple(row.answers), len(hops), decomposition=hops)


def turn_of(turn: PlayedTurn) -> Turn:
    """The turn of a row, without tokens and hits."""
    action = Action(turn.kind, turn.content, tuple(turn.queries))
    return Turn(action, text=turn.text, observation=turn.observation, executed=turn.executed)


def _fault(row: PlayedRow, found: StepLabels) -> str | None:
    """Why a row is left out; the reason of a labeller ends at its colon."""
    if found.labels is None:
        return found.reason.partition(":")[0] or "no_labels"
    return "labels_differ" if len(found.labels) != len(row.searches) else None


def _labelled(row: PlayedRow, found: StepLabels, hops: tuple[Hop, ...], counts: Counts) -> LabelRow:
    assert found.labels is not None
    counts.kept += 1
    counts.right += row.is_right
    counts.searches += len(found.labels)
    counts.pivots += sum(found.labels)
    return LabelRow(
        question_id=row.question_id,
        question=row.question,
        copy=row.copy,
        part=row.part,
        status=row.status,
        answer=row.answer,
        is_right=row.is_right,
        hops=len(hops),
        golden=[f"{hop.question} {hop.answer}" for hop in hops],
        labels=["+" if is_pivot else "-" for is_pivot in found.labels],
        reason=found.reason,
        turns=row.turns,
    )


def samples(rows: Sequence[LabelRow], count: int, seed: str) -> list[LabelRow]:
    """Some rows for a human audit, drawn by seed, in order."""
    chosen = random.Random(seed).sample(range(len(rows)), min(count, len(rows)))
    return [rows[i] for i in sorted(chosen)]
