"""Which groups can teach?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.types import Scores, Trajectory


@dataclass(frozen=True)
class KeepAll:
    """Keeps every trajectory; `failed` ones never reach a filter."""

    def keep(self, trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> list[int]:
        """Indices of the kept trajectories, ascending."""
        return list(range(len(trajectories)))


def share_with_signal(trajectories: Sequence[Trajectory], scores: Sequence[Scores]) -> float:
    """Share of groups whose outcomes differ: the others have zero group advantage and teach nothing."""
    groups: dict[str, set[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        groups.setdefault(trajectory.group_id, set()).add(score.outcome)
    return sum(len(values) > 1 for values in groups.values()) / max(len(groups), 1)
