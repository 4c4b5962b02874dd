"""Which groups can teach? And must a step go on sampling until it has enough of them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.conf import require
from tasks.types import Scores, Trajectory


class Filter(Protocol):
    """Chooses the trajectories that are trained on.

    `max_rounds`: how often a step may draw further questions until it holds as many groups as one draw has; 1 never.
    """

    @property
    def max_rounds(self) -> int:
        """Rounds of sampling a step may take."""
        ...

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """Indices of the kept trajectories, ascending."""
        ...


@dataclass(frozen=True)
class KeepAll:
    """Keeps every trajectory; `failed` ones never reach a filter."""

    max_rounds: int = 1

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        return list(range(len(trajectories)))


@dataclass(frozen=True)
class MixedOutcomes:
    """Keeps groups with both better and worse outcomes: 0 < sum of R < G for a reward of 0 or 1 (dspo section 4).

    Attributes:
        part: the reward part that tells success, so that a length penalty cannot make a group look mixed.
        max_rounds: bound of the refill; 10 as in verl's DAPO scripts.
    """

    part: str
    max_rounds: int = 10

    def __post_init__(self) -> None:
        require(self.max_rounds >= 1, "max_rounds", self.max_rounds, "at least 1")

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        values = by_group(trajectories, [score.parts[self.part] for score in scores])
        return [i for i, t in enumerate(trajectories) if min(values[t.group_id]) < max(values[t.group_id])]


@dataclass(frozen=True)
class Successful:
    """Keeps the trajectories whose part is 1 (rejection sampling)."""

    part: str
    max_rounds: int = 1

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        return [i for i, score in enumerate(scores) if score.parts[self.part] >= 1]


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
