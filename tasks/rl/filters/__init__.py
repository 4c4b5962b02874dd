"""Which groups can teach, one file for each rule; and whether a step draws more questions until it has enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tasks.types import Sample, Scores


class Filter(Protocol):
    """Chooses the samples that are trained on."""

    @property
    def max_rounds(self) -> int:
        """How often a step may draw further questions until it keeps as many questions as one draw has; 1: never."""
        ...

    @property
    def score_parts(self) -> tuple[str, ...]:
        """The parts of the scores that it reads; a reward must give them."""
        ...

    @property
    def compares_group(self) -> bool:
        """Whether the members of a group are compared, which says nothing where there is one or all are alike."""
        ...

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """Indices of the kept samples, ascending."""
        ...


def by_group(samples: Sequence[Sample], values: Sequence[float]) -> dict[str, list[float]]:
    """Group id -> its members' values, in order."""
    groups: dict[str, list[float]] = {}
    for sample, value in zip(samples, values, strict=True):
        groups.setdefault(sample.group_id, []).append(value)
    return groups


def share_with_signal(samples: Sequence[Sample], scores: Sequence[Scores]) -> float:
    """Share of groups whose outcomes differ: the others have zero group advantage and teach nothing."""
    groups = by_group(samples, [score.outcome for score in scores])
    return sum(len(set(values)) > 1 for values in groups.values()) / max(len(groups), 1)
