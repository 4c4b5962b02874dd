"""A retriever whose documents are written instead of found (ZeroSearch); writers are in `writers`.

A written document is not a passage of any corpus, and its id shows that (`tasks.data.records` keeps ids that begin with
`generated:` out of every corpus). So there is nothing to index or to open, and `build` and `open_index` refuse.
Training with a simulator makes a `GeneratedRetriever` itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from tasks import store
from tasks.data.records import GENERATED
from tasks.retrieval import Progress, RetrievalError, check_request
from tasks.retrieval.manifest import Built, Manifest
from tasks.store import DataError
from tasks.types import Hit

Request = tuple[str, bool]
"""A query, and whether its documents shall be useful (else noisy)."""
Document = tuple[str, str]
"""Title (may be empty) and text."""


class Writer(Protocol):
    """Writes documents in place of a search engine."""

    def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
        """`top_k` documents for each request, the most useful first, none with a blank text. They depend on the seed.

        Raises:
            RuntimeError, OSError, ValueError: nothing could be written.
        """
        ...


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: generated`.

    Attributes:
        writer: only `none` exists, because writers are services (`tasks.services`).
    """

    backend: Literal["generated"]
    writer: Literal["none"] = "none"


@dataclass
class GeneratedRetriever:
    """Turns written documents into hits with score 1 / rank and an id made of the document's hash.

    It follows `tasks.retrieval.Retriever`, except that every query gets `top_k` hits. The documents of a query depend
    on writer, noise and seed alone, so that a resumed run gets the same ones.

    Attributes:
        writer: writes the documents.
        noise: share of queries that get noisy documents.
        seed: decides which queries are noisy; also given to the writer.
    """

    writer: Writer
    noise: float = 0.0
    seed: str = ""

    def announce(self, noise: float, seed: str) -> None:
        """Use this noise and seed from now on."""
        self.noise, self.seed = noise, seed

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """`top_k` written documents for each query."""
        check_request(queries, top_k)
        if not queries:
            return []
        useful = [random.Random(f"{self.seed}/{query}/noise").random() >= self.noise for query in queries]
        try:
            written = self.writer.write(list(zip(queries, useful, strict=True)), top_k, self.seed)
        except (OSError, RuntimeError, ValueError) as error:
            raise RetrievalError(f"generated: nothing was written: {type(error).__name__}: {error}") from error
        if len(written) != len(queries):
            raise RetrievalError(f"generated: found documents for {len(written)} queries, expected {len(queries)}.")
        return [_hits(query, documents, top_k) for query, documents in zip(queries, written, strict=True)]


def _hits(query: str, documents: list[Document], top_k: int) -> list[Hit]:
    good = sum(isinstance(text, str) and bool(text.strip()) for _, text in documents)
    if good != top_k or len(documents) != top_k:
        raise RetrievalError(
            f"generated: found {len(documents)} documents, {good} of them with text, expected {top_k} "
            f"for query {query!r:.80}."
        )
    return [
        Hit(f"{GENERATED}{store.digest(title, text)}", 1.0 / rank, title, text)
        for rank, (title, text) in enumerate(documents, start=1)
    ]


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Refuse: see the module.

    Raises:
        DataError: always.
    """
    _refuse(settings.writer)


def open_index(index_dir: Path, manifest: Manifest, num_threads: int = 1) -> GeneratedRetriever:
    """Refuse: see the module.

    Raises:
        DataError: always.
    """
    _refuse(str(manifest.settings.get("writer", "none")))


def _refuse(writer: str) -> NoReturn:
    raise DataError(
        f"backend=generated: writer={writer!r}, so nobody writes documents. Choose another backend in conf/retriever, "
        "or give a Writer to tasks.retrieval.generated.GeneratedRetriever."
    )
