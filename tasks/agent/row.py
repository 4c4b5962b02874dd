"""A trajectory while it is being played."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tasks.generate import Call, Session
from tasks.types import Question, Status, Trajectory, Turn


@dataclass
class Row:
    """A trajectory that is being played, row `number` of a session.

    Attributes:
        question: the question that is played.
        group_id: of the trajectory; forks inherit it.
        session, number: the generator's session and the row in it that holds this text.
        prompt: token ids.
        response, mask, logprobs: one entry per token after the prompt, as in `Trajectory`.
        turns: the calls so far; the last one has no observation until `Player.observe`.
        status: how it ended; None while it is being played.
        has_acted: whether its last call waits for an observation.
        answer, error: as in `Trajectory`.
    """

    question: Question
    group_id: str
    session: Session
    number: int
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status | None = None
    has_acted: bool = False
    answer: str | None = None
    error: str | None = None

    @classmethod
    def begun(cls, question: Question, index: int, session: Session, number: int, prompt: list[int]) -> Row:
        """Row `number` of a session, which plays question `index` of a draw."""
        return cls(question, f"{question.id}#{index}", session, number, prompt)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, so that no call and no observation can follow."""
        return self.status is not None

    @property
    def total(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    def record(self, call: Call) -> None:
        """Add what a call wrote to the text."""
        self.response.extend(call.token_ids)
        self.mask.extend([True] * len(call.token_ids))
        self.logprobs.extend(call.logprobs)

    def trajectory(self) -> Trajectory:
        """The record so far; its status is `open` while the row is being played."""
        return Trajectory(
            question_id=self.question.id,
            group_id=self.group_id,
            prompt_ids=tuple(self.prompt),
            response_ids=tuple(self.response),
            loss_mask=tuple(self.mask),
            sampler_logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            status=self.status or "open",
            answer=self.answer,
            error=self.error,
        )

    def copy(self, number: int) -> Row:
        """A copy of this record, which row `number` continues."""
        return replace(
            self,
            number=number,
            response=list(self.response),
            mask=list(self.mask),
            logprobs=list(self.logprobs),
            turns=list(self.turns),
        )
