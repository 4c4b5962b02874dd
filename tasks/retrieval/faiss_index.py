"""A FAISS index that somebody else has built, taken over as it is: row i of the index is passage i of the corpus.

Encoding 21 million passages takes GPU-days, and their index often exists (`e5_Flat.index` of Search-R1). Whether it
belongs to this corpus and this encoder is measured: some passages are encoded, and the index must find each of them.
The index is memory-mapped where it lies; our folder holds passages and manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from tasks import conf, store
from tasks.conf import Share, require
from tasks.retrieval import Progress, RetrievalError, check_request, nearest
from tasks.retrieval.encoders import (
    MINILM,
    PASSAGE_FORMAT,
    Encoder,
    SentenceEncoder,
    Vectors,
    check_encoder,
    passage_text,
    require_passage_format,
)
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import Passages, copy_passages, read_corpus
from tasks.retrieval.ranking import CANDIDATES, best_candidates, top_rows
from tasks.store import DataError
from tasks.types import Hit, Passage

FOUND_AMONG = 10
"""A checked passage must be among so many hits of its own vector."""
FEW = 10 * FOUND_AMONG
"""Below so many passages a hit counts only with the score of its own vector, to within `SCORE_TOLERANCE`."""
SCORE_TOLERANCE = 0.1
NUM_CHECKED = 64


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: faiss_index`.

    Attributes:
        path: of the index file, from the root of the clone.
        encoder: that made its vectors: `minilm`, or a sentence-transformers or E5 folder.
        query_prefix: stands before each query; E5 was trained with `query: `.
        passage_format: the text whose vectors the index holds, with `{title}` and `{text}` in it. Search-R1 encodes
            `passage: "{title}"` with `{text}` on a second line.
        max_tokens: cut texts after so many tokens; 0 keeps the encoder's own limit.
        nprobe: lists of an IVF index that a query searches; 0 keeps the number in the file.
        ef_search: candidates of an HNSW index that a query looks at; 0 keeps the number in the file.
        min_found: share of checked passages that the index must find by their own vectors.
        batch_size: texts in one pass of the encoder.
        device: where the encoder runs.
    """

    requires = "dense"

    backend: Literal["faiss_index"]
    path: str
    encoder: str = MINILM
    query_prefix: str = ""
    passage_format: str = PASSAGE_FORMAT
    max_tokens: NonNegativeInt = 0
    nprobe: NonNegativeInt = 0
    ef_search: NonNegativeInt = 0
    min_found: Share = 0.9
    batch_size: PositiveInt = 32
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "the file of a FAISS index")
        require_passage_format(self.passage_format)


def build(
    corpus: Path,
    corpus_sha256: str,
    out: Path,
    settings: Settings,
    scratch: Path | None,
    progress: Progress,
    encoder: Encoder | None = None,
) -> Built:
    """Copy the passages and check the index; see `tasks.retrieval.build`. `scratch` is not used.

    Raises:
        DataError: besides a bad corpus, a file that is no FAISS index, or one of other passages or another encoder.
    """
    path = Path(settings.path)
    index = _read(path)
    num_rows = sum(1 for _ in progress(copy_passages(read_corpus(corpus), out), None, "copying passages"))
    encoder = encoder or _load_encoder(settings)
    _require_fit(path, index, num_rows, encoder)

    found = _share_found(_Index(index, settings), Passages(out), settings, encoder)
    if found < settings.min_found:
        raise DataError(
            f"{path}: of {min(NUM_CHECKED, num_rows)} passages of {corpus}, {found:.0%} are among the first "
            f"{FOUND_AMONG} hits of their own vectors, expected {settings.min_found:.0%} (min_found). The index is of "
            "another corpus or order, or its encoder, passage_format or max_tokens is another. Name what it was built "
            "with; an approximate index may need more nprobe or ef_search."
        )
    about = {"bytes": path.stat().st_size, "sha256": store.sha256(path)}
    details = {
        "encoder_sha256": encoder.sha256,
        "dimension": encoder.dimension,
        "found": round(found, 4),
        "file": about,
    }
    return Built(num_rows, details, ("faiss-cpu", "numpy", "sentence-transformers", "torch", "transformers"))


def open_index(
    index_dir: Path, manifest: Manifest, num_threads: int = 1, encoder: Encoder | None = None
) -> GivenRetriever:
    """Open what `build` took over.

    Raises:
        DataError: the file is gone or another, or the encoder is.
    """
    where = index_dir / NAME
    settings = conf.fill(Settings, manifest.settings, str(where))
    path, size = Path(settings.path), manifest.details["file"]["bytes"]
    index = _read(path)
    if path.stat().st_size != size:
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes, and {where} was made for an index of {size:,}. Put that one back, "
            "or take this one over: `dvc repro --force index`."
        )
    encoder = encoder or _load_encoder(settings)
    check_encoder(encoder, settings.encoder, manifest.details.get("encoder_sha256"), where)
    return GivenRetriever(index_dir, settings, index, encoder, num_threads)


class GivenRetriever:
    """Searches one index; see `tasks.retrieval.Retriever`. A score is the inner product that the index computes."""

    def __init__(self, index_dir: Path, settings: Settings, index: Any, encoder: Encoder, num_threads: int = 1) -> None:
        require(num_threads >= 1, "num_threads", num_threads, "at least 1")
        self.passages = Passages(index_dir)
        self._settings, self._encoder, self._num_threads = settings, encoder, num_threads
        self._index = _Index(index, settings)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        if not queries:
            return []
        try:
            prefix = self._settings.query_prefix
            vectors = self._encoder.encode([prefix + query for query in queries], self._settings.batch_size)
            rank = top_rows if self._index.exact else best_candidates
            with nearest.threads(self._num_threads):
                found = rank(self._index.search, vectors, top_k, len(self.passages))
            return self.passages.hits(*found)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            raise RetrievalError(f"faiss_index: the search failed: {type(error).__name__}: {error}") from error


class _Index:
    """See `nearest.Index`; a query that finds too few rows is searched again as widely as the index allows."""

    def __init__(self, index: Any, settings: Settings) -> None:
        import faiss

        self._faiss, self._index = faiss, index
        self._ivf = faiss.try_extract_index_ivf(index)
        self._hnsw = getattr(faiss.downcast_index(index), "hnsw", None)
        self.exact = self._ivf is None and self._hnsw is None
        if self._ivf is not None and settings.nprobe:
            self._ivf.nprobe = min(settings.nprobe, self._ivf.nlist)
        if self._hnsw is not None:
            self._hnsw.efSearch = max(settings.ef_search or self._hnsw.efSearch, CANDIDATES)

    def search(self, vectors: Vectors, count: int) -> nearest.Found:
        """See `nearest.Index`."""
        scores, rows = self._index.search(vectors, count)
        if (short := np.flatnonzero(rows[:, -1] < 0)).size:
            scores[short], rows[short] = self._search_widely(vectors[short], count)
        if (rows[:, -1] < 0).any():
            raise RuntimeError(f"the index gave fewer than {count} rows.")
        return rows, scores

    def _search_widely(self, vectors: Vectors, count: int) -> Any:
        if self._ivf is not None:
            before, self._ivf.nprobe = self._ivf.nprobe, self._ivf.nlist
            try:
                return self._index.search(vectors, count)
            finally:
                self._ivf.nprobe = before
        assert self._hnsw is not None
        before, self._hnsw.efSearch = self._hnsw.efSearch, max(count, self._index.ntotal)
        try:
            return self._index.search(vectors, count)
        finally:
            self._hnsw.efSearch = before


def _read(path: Path) -> Any:
    import faiss

    if not path.is_file():
        raise DataError(f"{path}: no such file. Set `path` in conf/retriever to a FAISS index.")
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise DataError(f"{path}: not a FAISS index: {str(error).splitlines()[0]}") from None


def _require_fit(path: Path, index: Any, num_rows: int, encoder: Encoder) -> None:
    """Raise the DataError for an index of other numbers than the corpus and the encoder have."""
    import faiss

    if index.ntotal != num_rows:
        raise DataError(
            f"{path}: {index.ntotal:,} vectors, and the corpus has {num_rows:,} passages. Row i of the index must be "
            "passage i of the corpus."
        )
    if index.d != encoder.dimension:
        raise DataError(f"{path}: vectors of {index.d} numbers, and the encoder makes {encoder.dimension}.")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise DataError(
            f"{path}: metric {index.metric_type}, expected {faiss.METRIC_INNER_PRODUCT}, the inner product."
        )


def _share_found(index: _Index, passages: Passages, settings: Settings, encoder: Encoder) -> float:
    """Share of passages, spread evenly over the corpus, that their own vectors find."""
    rows = np.unique(np.linspace(0, len(passages) - 1, NUM_CHECKED).round().astype(np.int64))
    hits = passages.hits(rows[None], np.zeros((1, len(rows))))[0]
    texts = [passage_text(settings.passage_format, Passage(h.passage_id, h.title, h.text)) for h in hits]
    vectors = encoder.encode(texts, settings.batch_size)
    found, scores = index.search(vectors, min(FOUND_AMONG, len(passages)))
    is_own = found == rows[:, None]
    if len(passages) < FEW:  # Any index finds a passage among so few.
        products = (vectors * vectors).sum(axis=1, keepdims=True)
        is_own &= abs(scores - products) <= SCORE_TOLERANCE * products
    return float(np.mean(is_own.any(axis=1)))


def _load_encoder(settings: Settings) -> Encoder:
    return SentenceEncoder(settings.encoder, settings.max_tokens, settings.device)
