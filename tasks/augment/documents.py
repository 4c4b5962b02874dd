"""A language model that plays the search engine of training (ZeroSearch), over the chat-completions protocol.

It is told the query and whether its documents are to be useful or noisy, and gives back JSON:
`{"documents": [{"title": text, "text": text}, ...]}`. It never sees question or answer: it stands where a search
engine stands. (ZeroSearch's own simulator is told both.) A reply that cannot be read is asked for again; after the
last attempt the search has failed, which is no empty observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tasks.augment.endpoint import Endpoint, RefusedError
from tasks.augment.openai import UnusableError, filled, read_json
from tasks.augment.settings import SimulatorConf
from tasks.retrieval.generated import Document, Request


@dataclass(frozen=True)
class _ReplyDocument:
    """One document of a reply."""

    title: str
    text: str


@dataclass(frozen=True)
class _ReplyDocuments:
    """The schema of a reply."""

    documents: tuple[_ReplyDocument, ...]


class EndpointWriter:
    """See the module; answers to one request and seed come from the endpoint's cache when they are asked for again."""

    def __init__(self, endpoint: Endpoint, conf: SimulatorConf) -> None:
        """`endpoint`: made of `conf.endpoint`."""
        self.endpoint, self.conf = endpoint, conf

    def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
        """See `tasks.retrieval.generated.Writer`.

        Raises:
            WriterError: the endpoint cannot be used now.
            ValueError: no reply to some query could be read, or the server refuses it.
        """
        with ThreadPoolExecutor(self.conf.endpoint.max_in_flight, thread_name_prefix="simulator") as pool:
            return list(pool.map(lambda request: self._write_one(request, top_k, seed), requests))

    def _write_one(self, request: Request, top_k: int, seed: str) -> list[Document]:
        query, useful = request
        kind = self.conf.useful if useful else self.conf.noisy
        prompt = filled(self.conf.endpoint.prompt, {"{query}": query, "{kind}": kind, "{num_documents}": str(top_k)})
        problem = ""
        for attempt in range(self.conf.attempts):
            # The seed makes draws of other steps other requests; without it the cache would answer them all alike.
            messages = [{"role": "system", "content": f"Draw {seed}, attempt {attempt + 1}."}]
            try:
                reply = self.endpoint.complete([*messages, {"role": "user", "content": prompt}])
                found = [(one.title, one.text) for one in read_json(reply, _ReplyDocuments).documents[:top_k]]
            except (UnusableError, RefusedError) as error:
                problem = ": ".join(map(str, error.args))
                continue
            if len(found) == top_k and all(text.strip() for _, text in found):
                return found
            problem = f"found {len(found)} documents with text, expected {top_k}"
        raise ValueError(f"query {query!r:.80}: no usable reply in {self.conf.attempts} attempts: {problem}")
