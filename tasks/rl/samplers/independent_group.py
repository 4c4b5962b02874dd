"""Each question is played several times, independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.agent.rollout import Player
from tasks.conf import require
from tasks.generate import Sampling
from tasks.rl.samplers import Draw, Score, draw_of_trajectories
from tasks.types import Question


@dataclass(frozen=True)
class IndependentGroup:
    """`size` independent trajectories per question.

    GRPO Eq. 3 (arXiv 2402.03300; docs/methods/grpo.md)

    Attributes:
        size: 1 for PPO, a group for GRPO.
        from_start: the start policy plays instead of the one under training (rejection sampling).
    """

    size: int
    from_start: bool = False
    has_logprobs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(1 <= self.size <= 1024, "size", self.size, "1 to 1024")

    def draw(self, player: Player, questions: Sequence[Question], sampling: Sampling, score: Score) -> Draw:
        """See `Sampler`; each trajectory is one sample, and all trajectories of a question are a group."""
        played = player.play(questions, self.size, sampling)
        return draw_of_trajectories(played, self.size, questions, score)


PART = IndependentGroup
