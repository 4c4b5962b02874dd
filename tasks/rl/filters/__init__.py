"""Which samples are trained on, one file for each rule, and how often a step draws more questions to fill a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tasks.types import Sample, Scores


class Filter(Protocol):
    """Chooses the samples that are trained on."""

    @property
    def max_rounds(self) -> int:
        """Most draws of a step. A step draws again while it has kept fewer questions than one draw holds."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the score components that it reads; a reward of the method must give them."""
        ...

    @property
    def compares_group(self) -> bool:
        """Whether the members of a group are compared; a group must then have two or more that can differ."""
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
    """Share of groups whose outcomes differ; the other groups have zero group advantage and teach nothing."""
    groups = by_group(samples, [score.outcome for score in scores])
    return sum(len(set(values)) > 1 for values in groups.values()) / max(len(groups), 1)
