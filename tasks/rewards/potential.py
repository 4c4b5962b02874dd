"""TIPS: what a turn added to the likelihood of the gold answer under a frozen copy of the policy.

Phi_t is the mean log-probability of the gold answer's tokens after the trajectory up to and with turn t's observation,
and turn t earns scale * (Phi_t - Phi_{t-1}). The scale is a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rewards import Field
from tasks.rewards.shaping import observed_turns, on_observed_turns
from tasks.services import NO_SERVICES, LogProbs, Pair, Role, Services
from tasks.services.numbers import check_numbers
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class AnswerPotential:
    """scale * (Phi_t - Phi_{t-1}) on the last token of each turn that caused an observation.

    TIPS Abstract (arXiv 2603.22293; docs/methods/tips.md)
    TIPS info_reward_llm.py (ucsd-wang-lab-lm/tips@e075901; docs/methods/tips.md)

    Attributes:
        scale: weight of the difference.
        opening: the text that opens an answer in the method's grammar.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("log_probs",)
    components: ClassVar[tuple[str, ...]] = ("potential",)

    scale: float
    opening: str = "<answer>"

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "0 or more")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; all log-probabilities are asked for in one call.

        Raises:
            ValueError: a trajectory has an answer that does not follow `opening`, or the service does not return a
                finite number for each pair.
        """
        model = services["log_probs"]
        pairs = [self._pairs(model, t, question) for t, question in zip(trajectories, questions, strict=True)]
        asked = [pair for of_trajectory in pairs for pair in of_trajectory]
        means = model.mean_logprobs(asked)
        check_numbers(means, len(asked), "services: log_probs", "pair")
        logprobs = iter(means)
        potentials = [[next(logprobs) for _ in of_trajectory] for of_trajectory in pairs]
        return [on_observed_turns(t, phi, self.scale) for t, phi in zip(trajectories, potentials, strict=True)]

    def _pairs(self, model: LogProbs, trajectory: Trajectory, question: Question) -> list[Pair]:
        """The gold answer after the prompt, and after each observation.

        The opening tag and the answer are encoded separately: a token across their border would be scored with both.
        """
        self._check(trajectory)
        opening = tuple(model.encode(self.opening))
        answer = tuple(model.encode(f" {question.answers[0].strip()}"))
        ends = [0, *(turn.observation_end for turn in observed_turns(trajectory))]
        return [(trajectory.prompt_ids + trajectory.response_ids[:end] + opening, answer) for end in ends]

    def _check(self, trajectory: Trajectory) -> None:
        """Fail where an answer does not follow `opening`: the method's grammar then opens answers with another text."""
        if trajectory.status == "answered" and self.opening not in trajectory.turns[-1].text:
            written = trajectory.turns[-1].text[-80:]
            raise ValueError(
                f"rewards: potential: opening={self.opening!r}: found an answer without it ({written!r}). Give the "
                "text that opens an answer in this method's grammar."
            )


PART = AnswerPotential
