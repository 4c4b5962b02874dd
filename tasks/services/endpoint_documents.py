"""A language model that plays the search engine of training (ZeroSearch), behind an OpenAI-compatible server.

Its prompt holds the query and whether documents shall be useful or noisy, and it replies with JSON:
`{"documents": [{"title": text, "text": text}, ...]}`. It never sees question or answer, because a search engine does
not see them either. (ZeroSearch's own simulator sees both.) If a reply cannot be read, the request is sent again; after
the last attempt the search has failed, which is no empty observation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.records.usage import Usage
from tasks.retrieval.generated import Document, GeneratedRetriever, Request
from tasks.services import Chat, Messages, Refusal, Reply, Resources, Role
from tasks.services.endpoint import Endpoint
from tasks.services.replies import UnusableError, check_prompt, filled, read_json

PLACEHOLDERS = ("{query}", "{kind}", "{num_documents}")


@dataclass(frozen=True)
class EndpointDocuments:
    """The model that writes documents.

    Attributes:
        useful, noisy: the words that replace `{kind}`.
        attempts: most requests for one query until a reply can be read.
        prompt: text with `PLACEHOLDERS`.
        chat: the server, the model and its budget.
    """

    role: ClassVar[Role] = "documents"
    needs_reference: ClassVar[bool] = False

    useful: str
    noisy: str
    attempts: int
    prompt: str
    chat: Endpoint

    def __post_init__(self) -> None:
        require(self.attempts >= 1, "attempts", self.attempts, "at least 1")
        check_prompt(self.prompt, PLACEHOLDERS)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[Simulator]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            simulator = Simulator(ModelWriter(chat, self))
            simulator.usage = chat.usage
            yield simulator


class Simulator(GeneratedRetriever):
    """A retriever whose documents a model writes.

    Attributes:
        usage: what the model did.
    """

    usage: Usage


@dataclass(frozen=True)
class _ReplyDocument:
    """One document of a reply."""

    title: str
    text: str


@dataclass(frozen=True)
class _ReplyDocuments:
    """The schema of a reply."""

    documents: tuple[_ReplyDocument, ...]


@dataclass(frozen=True)
class ModelWriter:
    """Asks `chat` for documents; a repeated request with the same seed is answered from the cache of `chat`."""

    chat: Chat
    conf: EndpointDocuments

    def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
        """See `tasks.retrieval.generated.Writer`.

        Raises:
            ServiceError: the model cannot be used now.
            ValueError: for some query no reply could be read, or the server refuses it.
        """
        written: dict[int, list[Document]] = {}
        problems: dict[int, str] = {}
        for attempt in range(1, self.conf.attempts + 1):
            missing = [number for number in range(len(requests)) if number not in written]
            conversations = [self._conversation(requests[number], top_k, seed, attempt) for number in missing]
            for number, reply in zip(missing, self.chat.replies(conversations), strict=True):
                try:
                    written[number] = _documents(reply, top_k)
                except UnusableError as error:
                    self.chat.usage.failures += isinstance(reply, Reply)
                    problems[number] = ": ".join(map(str, error.args))

        for number, (query, _) in enumerate(requests):
            if number not in written:
                reason = f"no usable reply in {self.conf.attempts} attempts: {problems[number]}"
                raise ValueError(f"query {query!r:.80}: {reason}")
        return [written[number] for number in range(len(requests))]

    def _conversation(self, request: Request, top_k: int, seed: str, attempt: int) -> Messages:
        query, useful = request
        kind = self.conf.useful if useful else self.conf.noisy
        prompt = filled(self.conf.prompt, {"{query}": query, "{kind}": kind, "{num_documents}": str(top_k)})
        # Without the seed in the request the cache would answer a query alike in every step.
        draw = {"role": "system", "content": f"Draw {seed}, attempt {attempt}."}
        return [draw, {"role": "user", "content": prompt}]


def _documents(reply: Reply | Refusal, top_k: int) -> list[Document]:
    """The first `top_k` documents of a reply.

    Raises:
        UnusableError: the reply is a refusal, cannot be read, or has too few documents with text.
    """
    if isinstance(reply, Refusal):
        raise UnusableError(reply.detail)
    documents = [(document.title, document.text) for document in read_json(reply, _ReplyDocuments).documents[:top_k]]
    if len(documents) == top_k and all(text.strip() for _, text in documents):
        return documents
    raise UnusableError(f"found {len(documents)} documents with text, expected {top_k}")


PART = EndpointDocuments
