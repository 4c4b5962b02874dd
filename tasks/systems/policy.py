"""A language model that plays with a prompt and a grammar: the start policy and every trained one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.types import Mode, Question, Trajectory

TEMPERATURES: dict[Mode, float] = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class PolicySystem:
    """One policy with its retriever and budgets; its episodes are trajectories."""

    player: Player

    @property
    def batch_questions(self) -> int:
        """As many as the budget of rows allows."""
        return self.player.conf.batch_rows

    @property
    def tokenizer(self) -> Any:
        """The policy's."""
        return self.player.tokenizer

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> list[Trajectory]:
        """See `System`."""
        return self.player.play(questions, 1, Sampling(TEMPERATURES[mode], 1.0, (), seed=seed))
