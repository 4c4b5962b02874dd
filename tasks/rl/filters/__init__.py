"""Which groups can teach, one file for each rule; and whether a step draws more questions until it has enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tasks.types import Scores, Trajectory


class Filter(Protocol):
    """Chooses the trajectories that are trained on."""

    @property
    def max_rounds(self) -> int:
        """How often a step may draw further questions until it holds as many groups as one draw has; 1: never."""
        ...

    @property
    def score_parts(self) -> tuple[str, ...]:
        """The parts of the scores that it reads; a reward must give them."""
        ...

    @property
    def compares_group(self) -> bool:
        """Whether the members of a group are compared, which says nothing where there is one or all are alike."""
        ...

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """Indices of the kept trajectories, ascending."""
        ...


def by_group(trajectories: Sequence[Trajectory], values: Sequence[float]) -> dict[str, list[float]]:
    """Group id -> its members' values, in order."""
    groups: dict[str, list[float]] = {}
    for trajectory, value in zip(trajectories, values, strict=True):
        groups.setdefault(trajectory.group_id, []).append(value)
    return groups


def share_with_signal(trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> float:
    """Share of groups whose outcomes differ: the others have zero group advantage and teach nothing."""
    groups = by_group(trajectories, [score.outcome for score in scores])
    return sum(len(set(values)) > 1 for values in groups.values()) / max(len(groups), 1)
