"""Which trajectories are drawn for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.agent.rollout import Player
from tasks.conf import require
from tasks.generate import Sampling
from tasks.types import Action, Question, Trajectory, Turn


class Sampler(Protocol):
    """Draws the trajectories of some questions.

    `size`: members of a group. `from_start`: the start policy plays, not the one under training. `has_logprobs`:
    sampler logprobs are a generator's.
    """

    @property
    def size(self) -> int:
        """Trajectories of one question."""
        ...

    @property
    def from_start(self) -> bool:
        """Whether the start policy plays."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether a generator drew the tokens."""
        ...

    def sample(self, player: Player, questions: Sequence[Question], sampling: Sampling) -> list[Trajectory]:
        """Trajectories of question i at i*size ... in order."""
        ...


@dataclass(frozen=True)
class IndependentGroup:
    """`size` independent trajectories per question (1 for PPO, a group for GRPO)."""

    size: int
    from_start: bool = False
    has_logprobs: bool = True

    def __post_init__(self) -> None:
        require(self.size >= 1, "group_size", self.size, "at least 1")

    def sample(self, player: Player, questions: Sequence[Question], sampling: Sampling) -> list[Trajectory]:
        """See `Sampler`."""
        return player.play(questions, self.size, sampling)


@dataclass(frozen=True)
class GoldAnswers:
    """No play: the one trajectory in which the question is answered directly with its main gold answer."""

    size: int = 1
    from_start: bool = False
    has_logprobs: bool = False

    def sample(self, player: Player, questions: Sequence[Question], sampling: Sampling) -> list[Trajectory]:
        """See `Sampler`; sampler logprobs are 0, nobody drew these tokens."""
        return [
            self._answered(player, question, prompt, i)
            for i, (question, prompt) in enumerate(zip(questions, player.prompts(questions), strict=True))
        ]

    def _answered(self, player: Player, question: Question, prompt: list[int], number: int) -> Trajectory:
        action = Action("answer", question.answers[0])
        text = player.grammar.render(action)
        ids = tuple(player.tokenizer.encode(text, add_special_tokens=False))
        return Trajectory(
            question_id=question.id,
            group_id=f"{question.id}#{number}",
            prompt_ids=tuple(prompt),
            response_ids=ids,
            loss_mask=(True,) * len(ids),
            sampler_logprobs=(0.0,) * len(ids),
            turns=(Turn(action, 0, len(ids), len(ids), text=text),),
            status="answered",
            answer=action.content,
        )
