"""Which trajectories are drawn for a step, one file for each way to draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.types import Question, Trajectory


class Sampler(Protocol):
    """Draws the trajectories of some questions."""

    @property
    def size(self) -> int:
        """Trajectories of one question, which are a group."""
        ...

    @property
    def from_start(self) -> bool:
        """Whether the start policy plays, not the one under training."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether a generator drew the tokens, so that sampler logprobs mean something."""
        ...

    def sample(self, player: Player, questions: Sequence[Question], sampling: Sampling) -> list[Trajectory]:
        """Trajectories of question i at i*size ... in order."""
        ...
