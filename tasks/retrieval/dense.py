"""Dense search: unit vectors of a sentence encoder in a FAISS index, memory-mapped, inner product = cosine.

Encoding is slow. So vectors are written shard by shard to a scratch folder (`tasks.retrieval.vectors`), and indexes of
every type are built from the same shards (`tasks.retrieval.nearest`). The recall of an approximate index against exact
search is measured when it is built, and the manifest records it. The encoder cuts texts that are longer than its limit.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
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
from tasks.retrieval.manifest import NAME, Built, Manifest, version
from tasks.retrieval.nearest import Hnsw, Ivf, Plan, Pq
from tasks.retrieval.passages import Passages, copy_passages, count_passages, read_corpus
from tasks.retrieval.ranking import best_candidates, top_rows
from tasks.retrieval.vectors import Shards, encode_missing
from tasks.store import DataError
from tasks.types import Hit, Passage

PROBE_QUERIES, PROBE_TOP_K, PROBE_WORDS = 200, 10, 12
"""How the recall of an approximate index is measured: number of queries, hits of a query, words of a query.

A query is the first words of a passage; these passages are spread evenly over the corpus."""

_ENCODING, _INDEXING = ("sentence-transformers", "torch", "transformers"), ("faiss-cpu", "numpy")
"""Libraries whose versions may change the last bits of the vectors, and of the index that is built from them."""
_VECTORS_FORMAT = 2  # Increase it when other text is encoded, so that no shard of an old version is reused.


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: dense`.

    Attributes:
        encoder: `minilm` (embedded, 384 dimensions, 256 tokens) or a sentence-transformers or E5 folder.
        query_prefix: stands before each query; E5 was trained with `query: `.
        passage_format: the text that is encoded, with `{title}` and `{text}` in it; for E5 `passage: {title} {text}`,
            as Search-R1 encodes Wikipedia `passage: "{title}"` with `{text}` on a second line.
        max_tokens: cut texts after so many tokens; 0 keeps the encoder's own limit.
        index: see `tasks.retrieval.nearest`; `auto` chooses by the number of passages.
        hnsw, ivf, pq: numbers of those index types.
        min_recall: refuse an approximate index whose recall@10 against exact search is lower; 0 only reports it.
        batch_size: texts in one pass of the encoder.
        shard_size: passages encoded between two saves.
        device: where the encoder runs; it is a setting, because it changes the last bits of the vectors.
    """

    requires = "dense"

    backend: Literal["dense"]
    encoder: str = MINILM
    query_prefix: str = ""
    passage_format: str = PASSAGE_FORMAT
    max_tokens: NonNegativeInt = 0
    index: Literal["auto", "flat", "hnsw", "ivf_pq", "sq8", "ivf_sq8"] = "auto"
    hnsw: Hnsw = field(default_factory=Hnsw)
    ivf: Ivf = field(default_factory=Ivf)
    pq: Pq = field(default_factory=Pq)
    min_recall: Share = 0.0
    batch_size: PositiveInt = 32
    shard_size: PositiveInt = 256
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
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
    """Fill folder `out`; see `tasks.retrieval.build`. `encoder` takes the place of the one the settings name.

    Raises:
        DataError: besides a bad corpus, settings that do not fit it, or a recall below `min_recall`.
    """
    num_rows = count_passages(corpus)
    encoder = encoder or _load_encoder(settings)
    plan = nearest.plan(settings.index, num_rows, encoder.dimension, settings.hnsw, settings.ivf, settings.pq)
    with _root(scratch) as root:
        vectors = vectors_folder(root, corpus_sha256, encoder, settings)
        vectors.mkdir(parents=True, exist_ok=True)
        shards = Shards(vectors, num_rows, encoder.dimension, settings.shard_size)
        passages = copy_passages(read_corpus(corpus), out)
        encode_missing(shards, passages, lambda batch: _encode(batch, encoder, settings), progress)
        work = root / f"index-{store.digest(vectors.name, plan.kind, plan.of_build, *map(version, _INDEXING))}"
        work.mkdir(exist_ok=True)
        nearest.build(plan, shards, out, work, progress)
        details = {"encoder_sha256": encoder.sha256, "dimension": encoder.dimension, "index": asdict(plan)}
        if plan.kind != "flat":
            details["probe"] = _probe(shards, out, plan, settings, encoder)
        shutil.rmtree(work)  # The vectors stay: another index, or the same one again, needs them.
    return Built(num_rows, details, (*_INDEXING, *_ENCODING))


def vectors_folder(scratch: Path, corpus_sha256: str, encoder: Encoder, settings: Settings) -> Path:
    """The folder of the shards of these vectors; its name is a hash of everything that changes them."""
    changing = (
        settings.passage_format, settings.max_tokens, settings.shard_size,
        settings.batch_size, settings.device,
    )  # fmt: skip
    versions = map(version, _ENCODING)
    return scratch / f"vectors-{store.digest(_VECTORS_FORMAT, corpus_sha256, encoder.sha256, *changing, *versions)}"


def open_index(
    index_dir: Path, manifest: Manifest, num_threads: int = 1, encoder: Encoder | None = None
) -> DenseRetriever:
    """Open a folder that `build` filled; `encoder` takes the place of the one the settings name.

    Raises:
        DataError: the encoder is not the one the index was built with.
    """
    where = index_dir / NAME
    settings = conf.fill(Settings, manifest.settings, str(where))
    encoder = encoder or _load_encoder(settings)
    check_encoder(encoder, settings.encoder, manifest.details.get("encoder_sha256"), where)
    return DenseRetriever(index_dir, settings, Plan(**manifest.details["index"]), encoder, num_threads)


class DenseRetriever:
    """Searches one index; see `tasks.retrieval.Retriever`. An empty query is encoded like any other text."""

    def __init__(self, index_dir: Path, settings: Settings, plan: Plan, encoder: Encoder, num_threads: int = 1) -> None:
        require(num_threads >= 1, "num_threads", num_threads, "at least 1")
        self.passages = Passages(index_dir)
        self._num_threads = num_threads
        self._settings = settings
        self._encoder = encoder
        self._index = nearest.open_index(index_dir, plan)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query; a score is a cosine, or what the index's codes keep of it."""
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
            raise RetrievalError(f"dense: the search failed: {type(error).__name__}: {error}") from error


def _load_encoder(settings: Settings) -> Encoder:
    return SentenceEncoder(settings.encoder, settings.max_tokens, settings.device)


def _encode(passages: list[Passage], encoder: Encoder, settings: Settings) -> Vectors:
    return encoder.encode([passage_text(settings.passage_format, one) for one in passages], settings.batch_size)


@contextlib.contextmanager
def _root(scratch: Path | None) -> Iterator[Path]:
    """`scratch`, or without one a folder that is removed when the block ends."""
    if scratch is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    else:
        scratch.mkdir(parents=True, exist_ok=True)
        yield scratch


def _probe(shards: Shards, out: Path, plan: Plan, settings: Settings, encoder: Encoder) -> dict[str, Any]:
    """What share of the exact best passages the index in `out` finds, averaged over the probe's queries.

    Raises:
        DataError: the share is below `min_recall`.
    """
    passages = Passages(out)
    rows = np.unique(np.linspace(0, len(passages) - 1, PROBE_QUERIES).round().astype(np.int64))
    texts = (f"{hit.title} {hit.text}" for hit in passages.hits(rows[None], np.zeros((1, len(rows))))[0])
    queries = [settings.query_prefix + " ".join(text.split()[:PROBE_WORDS]) for text in texts]
    vectors = encoder.encode(queries, settings.batch_size)
    top_k = min(PROBE_TOP_K, len(passages))
    found, _ = best_candidates(nearest.open_index(out, plan).search, vectors, top_k, len(passages))
    exact = nearest.exact_rows(shards, vectors, top_k)
    shares = [len(set(ours) & set(best)) / top_k for ours, best in zip(found.tolist(), exact.tolist(), strict=True)]
    recall = round(float(np.mean(shares)), 4)
    if recall < settings.min_recall:
        raise DataError(
            f"min_recall={settings.min_recall}: the {plan.kind} index finds {recall} of the {top_k} best passages of "
            f"exact search, with {plan.parameters}. Search more of it (ivf nprobe, hnsw ef_search), give codes more "
            "bits (pq m, or sq8), or choose flat. What was made is kept: the next build encodes nothing."
        )
    return {"num_queries": len(rows), f"recall@{top_k}": recall}
