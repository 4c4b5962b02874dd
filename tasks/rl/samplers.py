"""Which trajectories are drawn for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.agent.rollout import Player
from tasks.conf import require
from tasks.generate import Sampling
from tasks.types import Question, Trajectory


@dataclass(frozen=True)
class IndependentGroup:
    """`size` independent trajectories per question (1 for PPO, a group for GRPO)."""

    size: int

    def __post_init__(self) -> None:
        require(self.size >= 1, "group_size", self.size, "at least 1")

    def sample(self, player: Player, questions: Sequence[Question], sampling: Sampling) -> list[Trajectory]:
        """Trajectories of question i at i*size ... in order."""
        return player.play(questions, self.size, sampling)
