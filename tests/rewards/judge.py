"""A frozen reader as judge: a chat model reads the question and what was written, and replies with a score.

No paper: the smallest reward that asks a chat model. Put into `tasks/rewards/` it can be named in `conf/method/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rewards import Field, on_last_token
from tasks.services import NO_SERVICES, Messages, Refusal, Reply, Role, Services
from tasks.services.replies import UnusableError, check_prompt, filled, read_json
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class Verdict:
    """The schema of a reply."""

    score: float

    def __post_init__(self) -> None:
        require(0 <= self.score <= 1, "score", self.score, "0 to 1")


@dataclass(frozen=True)
class Judge:
    """The judge's score of the whole, on the last token; 0 where it refuses or its reply cannot be read.

    Attributes:
        scale: weight of the score.
        prompt: text with {question} and {text}, which is all that the policy wrote.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("chat",)
    components: ClassVar[tuple[str, ...]] = ("judge",)

    scale: float
    prompt: str

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "0 or more")
        check_prompt(self.prompt, ("{question}", "{text}"))

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory."""
        messages = [self._messages(t, question) for t, question in zip(trajectories, questions, strict=True)]
        with closing(services["chat"].replies(messages)) as replies:
            scores = [_score_in(reply) for reply in replies]
        return [on_last_token(t, self.scale * s, judge=s) for t, s in zip(trajectories, scores, strict=True)]

    def _messages(self, trajectory: Trajectory, question: Question) -> Messages:
        text = "\n".join(turn.text for turn in trajectory.turns)
        return [{"role": "user", "content": filled(self.prompt, {"{question}": question.question, "{text}": text})}]


def _score_in(reply: Reply | Refusal) -> float:
    try:
        return 0.0 if isinstance(reply, Refusal) else read_json(reply, Verdict).score
    except UnusableError:
        return 0.0


PART = Judge
