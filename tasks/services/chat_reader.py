"""A model behind an OpenAI-compatible server that answers from evidence (R-Search).

A request that fails is repeated as often as the endpoint says, and then the run ends: no answer is made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from tasks.reader.reading import Pair, check_prompt, filled
from tasks.records.usage import Usage
from tasks.services import Chat, Refusal, Resources, Role, ServiceError
from tasks.services.endpoint import Endpoint
from tasks.services.replies import one_paragraph


@dataclass(frozen=True)
class ChatReader:
    """The model that reads.

    R-Search Eq. 4, Table 5 (arXiv 2506.04185; docs/methods/r_search.md)

    Attributes:
        prompt: text with {question} and {evidence}.
        max_evidence_chars: longer evidence is cut at its end, because the server's model has a window, too.
        chat: the server, the model and its budget.
    """

    role: ClassVar[Role] = "reader"
    needs_reference: ClassVar[bool] = False

    prompt: str
    max_evidence_chars: PositiveInt
    chat: Endpoint

    def __post_init__(self) -> None:
        check_prompt(self.prompt)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ChatAnswers]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield ChatAnswers(chat, self)


@dataclass(frozen=True)
class ChatAnswers:
    """See `tasks.services.Reader`; equal requests are answered from the cache of `chat`."""

    chat: Chat
    conf: ChatReader

    @property
    def usage(self) -> Usage:
        """That of `chat`."""
        return self.chat.usage

    def answers(self, pairs: Sequence[Pair]) -> list[str]:
        """See `Reader`.

        Raises:
            ServiceError: the server cannot answer now, or refuses a question.
        """
        # The prompt of the paper has no marks, so evidence is kept from opening a paragraph with a question of its own.
        cut = [(one_paragraph(q), one_paragraph(evidence)[: self.conf.max_evidence_chars]) for q, evidence in pairs]
        prompts = [filled(self.conf.prompt, q, evidence) for q, evidence in cut]
        found: list[str] = []
        with closing(self.chat.replies([{"role": "user", "content": prompt}] for prompt in prompts)) as replies:
            for (question, _), reply in zip(pairs, replies, strict=True):
                if isinstance(reply, Refusal):
                    raise ServiceError(
                        f"services: reader: question {question[:60]!r}: the server refuses it ({reply.detail}), "
                        "expected an answer. Take another model, or leave the question out."
                    )
                found.append(reply.content.strip())
        return found


PART = ChatReader
