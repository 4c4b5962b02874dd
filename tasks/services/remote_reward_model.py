"""A trained reward model in another process or on another machine, behind an OpenAI-compatible server.

`python -m tasks.reward_model` is such a server. A request carries one trajectory as JSON, and the answer its
probabilities. An answer that cannot be used ends the step: no score is made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from tasks.records.usage import Usage
from tasks.reward_model.wire import Answer, request
from tasks.services import Chat, Messages, Probabilities, Refusal, Reply, Resources, Role, ServiceError
from tasks.services.endpoint import Endpoint
from tasks.services.replies import UnusableError, read_json
from tasks.types import Question, Trajectory


@dataclass(frozen=True)
class RemoteRewardModel:
    """See the module.

    Attributes:
        chat: the server; its `model` is the name that the server prints, which holds the hash of the weights.
    """

    role: ClassVar[Role] = "reward_model"
    needs_reference: ClassVar[bool] = False

    chat: Endpoint

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[AskedRewardModel]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield AskedRewardModel(chat)


@dataclass(frozen=True)
class AskedRewardModel:
    """See `tasks.services.RewardModel`."""

    chat: Chat

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
            return [_read(reply, len(t.turns), t.question_id) for reply, t in zip(replies, trajectories, strict=True)]


def _read(reply: Reply | Refusal, num_turns: int, question_id: str) -> Probabilities:
    """The probabilities of an answer.

    Raises:
        ServiceError: it is a refusal, or has another form or length.
    """
    where = f"services: reward_model: question {question_id!r}"
    if isinstance(reply, Refusal):
        raise ServiceError(f"{where}: the server refuses to score it: {reply.detail}. Mend the server, run again.")
    try:
        found = read_json(reply, Answer)
    except UnusableError as error:
        reason = ": ".join(map(str, error.args))
        raise ServiceError(f"{where}: no probabilities ({reason}). Mend the server, run again.") from None
    if len(found.after) != num_turns:
        raise ServiceError(
            f"{where}: found probabilities of {len(found.after)} turns, expected {num_turns}. Mend the server."
        )
    return Probabilities(found.before, found.after)


PART = RemoteRewardModel
