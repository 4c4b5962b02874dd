"""Documents that a language model writes instead of searching (ZeroSearch): the interface, and no writer yet.

A written document is not a passage: it stands in no corpus, and its id says so (`tasks.data.records` keeps ids that
begin with `generated:` out of every corpus). There is therefore nothing to index and nothing to open: `build` and
`open_index` refuse, and who has a writer gives it to `GeneratedRetriever`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from tasks import store
from tasks.data.records import GENERATED
from tasks.retrieval import Progress, RetrievalError, check_request
from tasks.retrieval.manifest import Built, Manifest
from tasks.store import DataError
from tasks.types import Hit


class Writer(Protocol):
    """A language model that plays the search engine."""

    def write(self, queries: list[str], top_k: int) -> list[list[str]]:
        """`top_k` documents for each query, the most useful first, none of them blank.

        Raises:
            RuntimeError, OSError: nothing could be written.
        """
        ...


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: generated`.

    Attributes:
        writer: who writes; `none` is all there is so far.
    """

    backend: Literal["generated"]
    writer: Literal["none"] = "none"


class GeneratedRetriever:
    """Turns written documents into hits: score 1 / rank, no title, an id made of the query's hash and the rank.

    `search` answers as `tasks.retrieval.Retriever` says, but its supply has no end: every query gets `top_k` hits.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """`top_k` written documents for each query."""
        check_request(queries, top_k)
        if not queries:
            return []
        try:
            written = self._writer.write(queries, top_k)
        except (OSError, RuntimeError, ValueError) as error:
            raise RetrievalError(f"generated: nothing was written: {type(error).__name__}: {error}") from error
        if len(written) != len(queries):
            raise RetrievalError(f"generated: found documents for {len(written)} queries, expected {len(queries)}.")
        return [self._hits(query, documents, top_k) for query, documents in zip(queries, written, strict=True)]

    def _hits(self, query: str, documents: list[str], top_k: int) -> list[Hit]:
        useful = sum(isinstance(text, str) and bool(text.strip()) for text in documents)
        if useful != top_k or len(documents) != top_k:
            raise RetrievalError(
                f"generated: found {len(documents)} documents, {useful} of them with text, expected {top_k} "
                f"for query {query!r:.80}."
            )
        name = f"{GENERATED}{store.digest(query)}"
        return [Hit(f"{name}:{rank}", 1.0 / rank, "", text) for rank, text in enumerate(documents, start=1)]


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
