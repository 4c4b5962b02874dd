"""A model behind an OpenAI-compatible server that answers from evidence (R-Search).

A request that fails is repeated as often as the endpoint says, and then the run ends: no answer is made up. A reply
that is empty or cut off is no answer: it earns nothing and counts as a failure, and too many of them end the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from tasks.agent.grammar import inert_tokens
from tasks.conf import Share
from tasks.reader.reading import Pair, check_prompt, filled
from tasks.records.usage import Usage
from tasks.services import Chat, Refusal, Reply, Resources, Role, ServiceError
from tasks.services.endpoint import Endpoint
from tasks.services.replies import Unusable, UnusableError, one_paragraph, require_whole


@dataclass(frozen=True)
class ChatReader:
    """The model that reads.

    R-Search Eq. 4, Table 5 (arXiv 2506.04185; docs/methods/r_search.md)

    Attributes:
        prompt: text with {question} and {evidence}.
        max_evidence_chars: longer evidence is cut at its end, because the server's model has a window, too.
        chat: the server, the model and its budget.
        max_unusable_share: largest share of the replies that may be empty or cut off; more end the run.
    """

    role: ClassVar[Role] = "reader"
    needs_reference: ClassVar[bool] = False

    prompt: str
    max_evidence_chars: PositiveInt
    chat: Endpoint
    max_unusable_share: Share = 0.5

    def __post_init__(self) -> None:
        check_prompt(self.prompt)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ChatAnswers]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield ChatAnswers(chat, self)


@dataclass
class ChatAnswers:
    """See `tasks.services.Reader`; equal requests are answered from the cache of `chat`.

    Attributes:
        num_read, num_unusable: replies, and those that were empty or cut off.
    """

    chat: Chat
    conf: ChatReader
    num_read: int = 0
    num_unusable: int = 0

    def __post_init__(self) -> None:
        self._unusable = Unusable("services: reader", self.conf.max_unusable_share)

    @property
    def usage(self) -> Usage:
        """That of `chat`."""
        return self.chat.usage

    def answers(self, pairs: Sequence[Pair]) -> list[str]:
        """See `Reader`.

        Raises:
            ServiceError: the server cannot answer now, refuses a question, or most replies are empty or cut off.
        """
        # The prompt of the paper has no marks, so evidence is kept from opening a paragraph with a question of its own.
        cut = [(one_paragraph(q), one_paragraph(evidence)[: self.conf.max_evidence_chars]) for q, evidence in pairs]
        prompts = [filled(self.conf.prompt, inert_tokens(q), inert_tokens(evidence)) for q, evidence in cut]
        found: list[str] = []
        with closing(self.chat.replies([{"role": "user", "content": prompt}] for prompt in prompts)) as replies:
            for (question, _), reply in zip(pairs, replies, strict=True):
                if isinstance(reply, Refusal):
                    raise ServiceError(
                        f"services: reader: question {question[:60]!r}: the server refuses it ({reply.detail}), "
                        "expected an answer. Take another model, or leave the question out."
                    )
                found.append(self._answer(reply))
        return found

    def _answer(self, reply: Reply) -> str:
        self.num_read += 1
        try:
            require_whole(reply)
        except UnusableError as error:
            self.usage.failures += 1
            self.num_unusable += 1
            self._unusable.note(": ".join(map(str, error.args)))
            return ""
        self._unusable.note(None)
        return reply.content.strip()


PART = ChatReader
