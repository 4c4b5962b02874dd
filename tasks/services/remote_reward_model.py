"""A trained reward model in another process or on another machine, behind an OpenAI-compatible server.

`python -m tasks.reward_model` is such a server. A request carries one trajectory as JSON, and the answer its
probabilities and what they mean. An answer that cannot be used ends the step: no score is made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from tasks.records.usage import Usage
from tasks.reward_model.wire import Answer, request
from tasks.services import Chat, Head, Messages, Probabilities, Refusal, Reply, Resources, Role, ServiceError
from tasks.services.endpoint import CACHE, Endpoint
from tasks.services.replies import UnusableError, read_json
from tasks.types import Question, Trajectory

_MEND = (
    f"Mend the server, remove its replies below {CACHE} and from a recording, where they would be read again, and run "
    "again."
)


@dataclass(frozen=True)
class RemoteRewardModel:
    """See the module.

    Attributes:
        chat: the server; its `model` is the name that the server prints, which holds the hash of the weights.
        head: what the model's number means. Every answer says it, too.
    """

    role: ClassVar[Role] = "reward_model"
    needs_reference: ClassVar[bool] = False

    chat: Endpoint
    head: Head

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[AskedRewardModel]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield AskedRewardModel(chat, self.head)


@dataclass(frozen=True)
class AskedRewardModel:
    """See `tasks.services.RewardModel`."""

    chat: Chat
    head: Head

    @property
    def usage(self) -> Usage:
        """That of `chat`."""
        return self.chat.usage

    def probabilities(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Probabilities]:
        """See `tasks.services.RewardModel`."""
        pairs = list(zip(trajectories, questions, strict=True))
        asked: list[Messages] = [
            [{"role": "user", "content": request(question.question, played.turns)}] for played, question in pairs
        ]
        with closing(self.chat.replies(asked)) as replies:
            return [self._read(reply, t) for reply, t in zip(replies, trajectories, strict=True)]

    def _read(self, reply: Reply | Refusal, trajectory: Trajectory) -> Probabilities:
        """The probabilities of an answer.

        Raises:
            ServiceError: it is a refusal, has another form or length, or its numbers mean something else.
        """
        where = f"services: reward_model: question {trajectory.question_id!r}"
        if isinstance(reply, Refusal):
            raise ServiceError(f"{where}: the server refuses to score it: {reply.detail}. {_MEND}")
        try:
            found = read_json(reply, Answer)
        except UnusableError as error:
            reason = ": ".join(map(str, error.args))
            raise ServiceError(f"{where}: no probabilities ({reason}). {_MEND}") from None

        if found.head != self.head:
            raise ServiceError(
                f"{where}: found numbers of head {found.head!r}, expected {self.head!r}. Name another server in "
                "conf/service/, or a method that reads these numbers."
            )
        if len(found.after) != len(trajectory.turns):
            raise ServiceError(
                f"{where}: found probabilities of {len(found.after)} turns, expected {len(trajectory.turns)}. {_MEND}"
            )
        if (gap := _gap(trajectory, found.after)) is not None:
            raise ServiceError(
                f"{where}: turn {gap + 1}: found null, expected a number from 0 to 1, because the turn searched and a "
                f"later one has a number. {_MEND}"
            )
        if (stray := _stray(trajectory, found.after)) is not None:
            raise ServiceError(
                f"{where}: turn {stray + 1}: found {found.after[stray]}, expected null, because the turn searched "
                f"nothing and is not the last. {_MEND}"
            )
        return Probabilities(found.before, found.after)


def _gap(trajectory: Trajectory, after: Sequence[float | None]) -> int | None:
    """The first search without a number that must have one; None where each has.

    What lies beyond the length that the model reads is the end of a trajectory, so a number after it cannot be.
    """
    last = max((number for number, f in enumerate(after) if f is not None), default=-1)
    return next((n for n in range(last) if trajectory.turns[n].executed and after[n] is None), None)


def _stray(trajectory: Trajectory, after: Sequence[float | None]) -> int | None:
    """The first turn with a number that can have none: it searched nothing and is not the last."""
    before_last = list(enumerate(zip(trajectory.turns, after, strict=True)))[:-1]
    return next((n for n, (turn, f) in before_last if f is not None and not turn.executed), None)


PART = RemoteRewardModel
