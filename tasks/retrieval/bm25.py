"""BM25 by bm25s (Lucene variant) over title and text, memory-mapped, searched by its numba backend.

score(q, d) = sum over query tokens t of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|)),
idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)), float32; a token that stands twice in the query counts twice.
Passages are read as a stream: in memory are the term numbers (4 bytes a token) and the scores, never the texts.
"""

from __future__ import annotations

import contextlib
import re
import threading
import unicodedata
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import conf
from tasks.conf import require
from tasks.retrieval import Progress, RetrievalError, check_request
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import Passages, copy_passages, read_corpus
from tasks.retrieval.ranking import top_rows
from tasks.types import Hit, Passage

_WORD = re.compile(r"\w\w+")


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


class _TermNumbers:
    """The corpus as term numbers: one flat array and where each passage starts; looks like a list of lists."""

    def __init__(self, analyzer: Analyzer, title_weight: int, progress: Progress) -> None:
        self.vocab: dict[str, int] = {"": 0}  # bm25s needs a term, even where no passage has one.
        self._analyzer = analyzer
        self._title_weight = title_weight
        self._progress = progress
        self._of_word: dict[str, int] = {}  # -1: a stop word
        self._flat = array("i")
        self._starts = array("q", [0])

    @property
    def ids(self) -> _TermNumbers:
        """bm25s' name for the passages' term numbers."""
        return self

    def add(self, passage: Passage) -> None:
        """Append a passage."""
        title = [number for word in self._analyzer.words(passage.title) if (number := self._number(word)) >= 0]
        for _ in range(self._title_weight):
            self._flat.extend(title)
        self._flat.extend(number for word in self._analyzer.words(passage.text) if (number := self._number(word)) >= 0)
        self._starts.append(len(self._flat))

    def _number(self, word: str) -> int:
        number = self._of_word.get(word)
        if number is None:
            term = self._analyzer.term(word)
            number = -1 if term is None else self.vocab.setdefault(term, len(self.vocab))
            self._of_word[word] = number
        return number

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus, as counted for the passages' lengths."""
        return len(self._flat)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for row in self._progress(range(len(self)), len(self), "indexing passages"):
            yield self._flat[self._starts[row] : self._starts[row + 1]].tolist()


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Fill folder `out`; see `tasks.retrieval.build`. Nothing is resumed: a million passages take minutes."""
    import bm25s

    numbers = _TermNumbers(Analyzer(settings), settings.title_weight, progress)
    for passage in progress(copy_passages(read_corpus(corpus), out), None, "reading passages"):
        numbers.add(passage)
    index = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numba", auto_compile=False)
    with np.errstate(invalid="ignore"):  # Passages without a single term have mean length 0.
        index.index(numbers, show_progress=False)
    index.save(out, show_progress=False)
    details = {"num_terms": len(numbers.vocab) - 1, "num_tokens": numbers.num_tokens}
    return Built(len(numbers), details, ("bm25s", "numpy", "PyStemmer"))


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
