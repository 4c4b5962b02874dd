"""Dense search: unit vectors of a sentence encoder in a flat FAISS index, memory-mapped, inner product = cosine.

Encoding is the slow part, so it goes shard by shard to a scratch folder, each shard written atomically: a
killed build continues after its last shard. Texts longer than the encoder's limit are cut, as the encoder does.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import conf, store
from tasks.conf import require
from tasks.retrieval import Progress, RetrievalError, check_request
from tasks.retrieval.encoders import MINILM, Encoder, SentenceEncoder, Vectors
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import Passages, copy_passages, count_passages, read_corpus
from tasks.retrieval.ranking import top_rows
from tasks.store import DataError
from tasks.types import Hit, Passage

VECTORS = "vectors.faiss"


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: dense`.

    Attributes:
        encoder: `minilm` (embedded, 384 dimensions, 256 tokens) or a sentence-transformers or E5 folder.
        query_prefix, passage_prefix: put before each text; E5 was trained with `query: ` and `passage: `.
        max_tokens: cut texts after so many tokens; 0 keeps the encoder's own limit.
        index: `flat` searches every vector.
        batch_size: texts in one pass of the encoder.
        shard_size: passages encoded between two saves.
        device: where the encoder runs; a setting because it moves the last bits of the vectors.
    """

    backend: Literal["dense"]
    encoder: str = MINILM
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 0
    index: Literal["flat"] = "flat"
    batch_size: int = 32
    shard_size: int = 256
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 (the encoder's own limit) or more")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(self.shard_size >= 1, "shard_size", self.shard_size, "at least 1")


def build(
    corpus: Path,
    corpus_sha256: str,
    out: Path,
    settings: Settings,
    scratch: Path | None,
    progress: Progress,
    encoder: Encoder | None = None,
) -> Built:
    """Fill folder `out`; see `tasks.retrieval.build`. `encoder` takes the place of the one the settings name."""
    import faiss

    encoder = encoder or _load_encoder(settings)
    num_shards = -(-count_passages(corpus) // settings.shard_size)
    index = faiss.IndexFlatIP(encoder.dimension)
    with _work_folder(scratch, store.digest(corpus_sha256, encoder.sha256, conf.plain(settings))) as work:
        shards = _shards(copy_passages(read_corpus(corpus), out), settings.shard_size)
        for number, shard in enumerate(progress(shards, num_shards, "encoding shards")):
            index.add(_shard_vectors(work / f"shard-{number:06d}.npy", shard, encoder, settings))
        faiss.write_index(index, str(out / VECTORS))
    details = {"encoder_sha256": encoder.sha256, "dimension": encoder.dimension}
    return Built(int(index.ntotal), details, ("faiss-cpu", "numpy", "sentence-transformers", "torch"))


def open_index(
    index_dir: Path, manifest: Manifest, num_threads: int = 1, encoder: Encoder | None = None
) -> DenseRetriever:
    """Open a folder that `build` filled; `encoder` takes the place of the one the settings name.

    Raises:
        DataError: the encoder is not the one the index was built with.
    """
    settings = conf.fill(Settings, manifest.settings, str(index_dir / NAME))
    encoder = encoder or _load_encoder(settings)
    expected = manifest.details.get("encoder_sha256")
    if encoder.sha256 != expected:
        raise DataError(
            f"{index_dir / NAME}: built with another encoder: {settings.encoder!r} has hash {encoder.sha256}, "
            f"the index was built with {expected}. Build the index again."
        )
    return DenseRetriever(index_dir, settings, encoder, num_threads)


class DenseRetriever:
    """Searches one index; see `tasks.retrieval.Retriever`. An empty query is encoded like any other text."""

    def __init__(self, index_dir: Path, settings: Settings, encoder: Encoder, num_threads: int = 1) -> None:
        import faiss

        require(num_threads >= 1, "num_threads", num_threads, "at least 1")
        faiss.omp_set_num_threads(num_threads)
        self.passages = Passages(index_dir)
        self._settings = settings
        self._encoder = encoder
        self._index = faiss.read_index(str(index_dir / VECTORS), faiss.IO_FLAG_MMAP_IFC)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query; a score is a cosine."""
        check_request(queries, top_k)
        if not queries:
            return []
        try:
            prefix = self._settings.query_prefix
            vectors = self._encoder.encode([prefix + query for query in queries], self._settings.batch_size)
            ranked = top_rows(self._best, list(vectors), top_k, len(self.passages))
            return [self.passages.hits(rows, scores) for rows, scores in ranked]
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            raise RetrievalError(f"dense: the search failed: {type(error).__name__}: {error}") from error

    def _best(self, vectors: list[Any], count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        scores, rows = self._index.search(np.stack(vectors), count)
        return rows, scores


def _load_encoder(settings: Settings) -> Encoder:
    return SentenceEncoder(settings.encoder, settings.max_tokens, settings.device)


@contextlib.contextmanager
def _work_folder(scratch: Path | None, key: str) -> Iterator[Path]:
    """A folder for shards: lasting and named by what the vectors depend on, or gone afterwards."""
    if scratch is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    else:
        folder = scratch / f"dense-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _shards(passages: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    passages = iter(passages)
    while shard := list(itertools.islice(passages, size)):
        yield shard


def _shard_vectors(path: Path, shard: list[Passage], encoder: Encoder, settings: Settings) -> Vectors:
    """[N, D] vectors of a shard, read if an earlier build left them whole, else encoded and saved."""
    saved = _read_shard(path, len(shard), encoder.dimension)
    if saved is not None:
        return saved
    texts = [f"{settings.passage_prefix}{passage.title}\n{passage.text}" for passage in shard]
    vectors = encoder.encode(texts, settings.batch_size)
    assert vectors.shape == (len(shard), encoder.dimension), vectors.shape
    if not np.isfinite(vectors).all():
        raise DataError(f"encoder {settings.encoder!r} gave a vector that is not finite for a passage of {path.stem}.")
    with store.replacing(path) as file:
        np.save(file, vectors)
    return vectors


def _read_shard(path: Path, rows: int, dimension: int) -> Vectors | None:
    """The saved shard, or None where there is none or it is not whole (it is then encoded again)."""
    try:
        vectors = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = vectors.shape == (rows, dimension) and vectors.dtype == np.float32 and bool(np.isfinite(vectors).all())
    return vectors if whole else None
