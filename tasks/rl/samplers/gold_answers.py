"""Gold answers instead of play, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.rl.samplers import Draw, Score, draw_of_trajectories
from tasks.types import Action, Question, Trajectory, Turn


@dataclass(frozen=True)
class GoldAnswers:
    """One trajectory per question, which answers it at once with its main gold answer; nothing is generated.

    InstructGPT Section 3.5 (arXiv 2203.02155; docs/methods/sft.md)
    """

    size: ClassVar[int] = 1
    from_start: ClassVar[bool] = False
    has_logprobs: ClassVar[bool] = False

    def draw(self, player: Player, questions: Sequence[Question], sampling: Sampling, score: Score) -> Draw:
        """See `Sampler`; sampler logprobs are 0, because no generator drew these tokens."""
        answered = [
            self._answered(player, question, prompt, i)
            for i, (question, prompt) in enumerate(zip(questions, player.prompts(questions), strict=True))
        ]
        return draw_of_trajectories(answered, self.size, questions, score)

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


PART = GoldAnswers
