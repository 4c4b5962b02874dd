"""BM25 by bm25s (Lucene variant) over title and text, memory-mapped, searched by its numba backend.

score(q, d) = sum over query tokens t of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|)),
idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)), float32; a token that stands twice in the query counts twice.
The files are those of bm25s; `tasks.retrieval.postings` writes them in bounded memory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import conf, store
from tasks.conf import require
from tasks.retrieval import Progress, RetrievalError, check_request, postings
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import Passages, copy_passages, read_corpus
from tasks.retrieval.ranking import top_rows
from tasks.types import Hit, Passage

_WORD = re.compile(r"\w\w+")
_CHUNK_FORMAT = 1  # Rises when words are counted in another way, so that no old chunk is taken for a new one.


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: bm25`.

    Attributes:
        k1: saturation of repeated terms; 0 counts a term once.
        b: how far passage length is divided out, in [0, 1].
        stemmer: `snowball` (English, PyStemmer) or `none`.
        stopwords: `english` (33 words, as Lucene), `english_plus` (bm25s' longer list) or `none`.
        title_weight: how often the title's words are counted; 0 leaves the title out.
    """

    backend: Literal["bm25"]
    k1: float = 1.5
    b: float = 0.75
    stemmer: Literal["snowball", "none"] = "none"
    stopwords: Literal["english", "english_plus", "none"] = "english"
    title_weight: int = 1

    def __post_init__(self) -> None:
        require(self.k1 >= 0, "k1", self.k1, "0 or more")
        require(0 <= self.b <= 1, "b", self.b, "a number in [0, 1]")
        require(self.title_weight >= 0, "title_weight", self.title_weight, "0 or more")


class Analyzer:
    """Text to terms: NFC, lower case, runs of two or more word characters, stop words out, stemming.

    >>> Analyzer(Settings("bm25", stemmer="snowball")).terms("The Running of the Bulls, 1924")
    ['run', 'bull', '1924']
    """

    def __init__(self, settings: Settings) -> None:
        from bm25s import stopwords

        self._stop = frozenset(
            {"english": stopwords.STOPWORDS_EN, "english_plus": stopwords.STOPWORDS_EN_PLUS}.get(settings.stopwords, ())
        )
        self._stem: Any = None
        if settings.stemmer == "snowball":
            import Stemmer

            self._stem = Stemmer.Stemmer("english")
        self._lock = threading.Lock()  # A Snowball stemmer keeps state between calls.

    def words(self, text: str) -> list[str]:
        """Words before stop words and stemming."""
        return _WORD.findall(unicodedata.normalize("NFC", text).lower())

    def term(self, word: str) -> str | None:
        """The term a word is indexed under; None for a stop word."""
        if word in self._stop:
            return None
        if self._stem is None:
            return word
        with self._lock:
            return str(self._stem.stemWord(word))

    def terms(self, text: str) -> list[str]:
        """Terms of a text in order, repeats kept."""
        return [term for word in self.words(text) if (term := self.term(word)) is not None]


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Fill folder `out`; see `tasks.retrieval.build`. A killed build counts no chunk of passages twice."""
    analyzer = Analyzer(settings)

    def words(passage: Passage) -> list[str]:
        title = analyzer.words(passage.title)
        if settings.title_weight == 0:
            vocabulary.of(title)  # Counted nowhere, numbered all the same.
        return title * settings.title_weight + analyzer.words(passage.text)

    vocabulary = postings.Vocabulary(analyzer.term)
    with _work_folder(scratch, corpus_sha256, settings) as work:
        passages = copy_passages(read_corpus(corpus), out)
        chunks = postings.count_chunks(progress(passages, None, "reading passages"), words, vocabulary, work)
        _save_parameters(vocabulary, sum(chunk.rows for chunk in chunks), settings, out)
        postings.write_scores(chunks, len(vocabulary.numbers), settings.k1, settings.b, out, progress)
    num_tokens = sum(int(chunk.lengths.sum(dtype=np.int64)) for chunk in chunks)
    details = {"num_terms": len(vocabulary.numbers) - 1, "num_tokens": num_tokens}
    return Built(sum(chunk.rows for chunk in chunks), details, ("bm25s", "numpy", "PyStemmer"))


def _save_parameters(vocabulary: postings.Vocabulary, num_rows: int, settings: Settings, out: Path) -> None:
    """Let bm25s write its vocabulary and parameters; the arrays it writes beside them are empty."""
    import bm25s

    index = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numba", auto_compile=False)
    index.vocab_dict, index.nonoccurrence_array = vocabulary.numbers, None
    none = np.zeros(0, dtype=np.float32)
    index.scores = {"data": none, "indices": none, "indptr": none, "num_docs": num_rows}
    index.save(out, show_progress=False)


@contextlib.contextmanager
def _work_folder(scratch: Path | None, corpus_sha256: str, settings: Settings) -> Iterator[Path]:
    """A folder for chunks, named by what they depend on; gone afterwards unless the build is killed or fails."""
    if scratch is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    analysis = (settings.stemmer, settings.stopwords, settings.title_weight)
    versions = [importlib.metadata.version(name) for name in ("bm25s", "PyStemmer")]
    limits = (postings.CHUNK_PASSAGES, postings.CHUNK_TOKENS)
    folder = scratch / f"bm25-{store.digest(_CHUNK_FORMAT, corpus_sha256, *analysis, *versions, *limits)}"
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    shutil.rmtree(folder)


def open_index(index_dir: Path, manifest: Manifest, num_threads: int = 1) -> Bm25Retriever:
    """Open a folder that `build` filled."""
    return Bm25Retriever(index_dir, conf.fill(Settings, manifest.settings, str(index_dir / NAME)), num_threads)


class Bm25Retriever:
    """Searches one index; see `tasks.retrieval.Retriever`.

    A query without an indexed term (an empty one, say) scores 0 everywhere, so its hits are the first passages
    of the corpus; rows that fill up a short result are chosen the same way.
    """

    def __init__(self, index_dir: Path, settings: Settings, num_threads: int = 1) -> None:
        import bm25s

        require(num_threads >= 1, "num_threads", num_threads, "at least 1")
        _keep_compiled_search()
        self.passages = Passages(index_dir)
        self._analyzer = Analyzer(settings)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        self._index = bm25s.BM25.load(index_dir, mmap=True, auto_compile=False, show_progress=False, backend="numba")

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        ids = [self._index.get_tokens_ids(self._analyzer.terms(query)) for query in queries]
        try:
            ranked = top_rows(self._best, ids, top_k, len(self.passages), floor=0.0)
            return [self.passages.hits(rows, scores) for rows, scores in ranked]
        except (OSError, MemoryError, ValueError) as error:
            raise RetrievalError(f"bm25: the search failed: {type(error).__name__}: {error}") from error

    def _best(self, queries: list[list[int]], count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The engine of `top_rows`; bm25s cannot take a query without terms, so those get zeros here."""
        rows = np.tile(np.arange(count, dtype=np.int64), (len(queries), 1))
        scores = np.zeros((len(queries), count), dtype=np.float32)
        filled = [i for i, ids in enumerate(queries) if ids]
        size = max(1, -(-len(filled) // self._num_threads))
        parts = [filled[start : start + size] for start in range(0, len(filled), size)]
        run = self._threads.map if self._threads else map
        found = run(lambda part: self._retrieve([queries[i] for i in part], count), parts)
        for part, (part_rows, part_scores) in zip(parts, found, strict=True):
            rows[part], scores[part] = part_rows, part_scores
        return rows, scores

    def _retrieve(self, queries: list[list[int]], count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        # One bm25s thread: its parallel search is another compilation of 10 s; this one lets go of the GIL.
        rows, scores = self._index.retrieve(queries, k=count, sorted=False, show_progress=False, n_threads=1)
        return rows, scores


@cache
def _keep_compiled_search() -> None:
    """Let numba keep bm25s' compiled search on disk: a process then starts in 0.2 s instead of 5.

    bm25s does not ask for it. Only the serial search may be kept: numba files the parallel one under the same
    name, and each would then be loaded in place of the other. A folder that cannot be written only costs the
    time again.
    """
    from bm25s.numba import retrieve_utils

    compiled: Any = getattr(retrieve_utils, "_retrieve_internal_jitted_serial", None)
    # numba raises RuntimeError where it finds no folder it may write to.
    with contextlib.suppress(AttributeError, RuntimeError):
        compiled.enable_caching()
