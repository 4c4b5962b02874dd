"""BM25 by bm25s (Lucene variant) over title and text, memory-mapped, searched by compiled code.

score(q, d) = sum over query tokens t of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|)),
idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)), float32; a token that occurs twice in the query counts twice.
BM25 Section 3 (doi 10.1561/1500000019; docs/methods/search.md)
BM25S Section 2 (arXiv 2407.03618; docs/methods/search.md)

The files are those of bm25s; `tasks.retrieval.postings` writes them in bounded memory, `tasks.retrieval.scoring`
searches them.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt

from tasks import conf, store
from tasks.conf import Share, require
from tasks.retrieval import Progress, RetrievalError, check_request, postings
from tasks.retrieval.manifest import NAME, Built, Manifest, version
from tasks.retrieval.passages import Passages, copy_passages, read_corpus
from tasks.text import composed
from tasks.types import Hit, Passage

_WORD = re.compile(r"\w\w+")
_CHUNK_FORMAT = 1  # Increase it when words are counted in another way, so that no chunk of an old version is reused.


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: bm25`.

    Attributes:
        k1: saturation of repeated terms; 0 counts a term once.
        b: how strongly scores are normalised by the length of the passage, in [0, 1].
        stemmer: `snowball` (English, PyStemmer) or `none`.
        stopwords: `english` (33 words, as Lucene), `english_plus` (bm25s' longer list) or `none`.
        title_weight: how many times each word of the title is counted; 0 leaves the title out.
    """

    backend: Literal["bm25"]
    k1: NonNegativeFloat = 1.5
    b: Share = 0.75
    stemmer: Literal["snowball", "none"] = "none"
    stopwords: Literal["english", "english_plus", "none"] = "english"
    title_weight: NonNegativeInt = 1


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
        return _WORD.findall(composed(composed(text).lower()))

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
    versions = [version(name) for name in ("bm25s", "PyStemmer")]
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

        from tasks.retrieval.scoring import best_rows

        require(num_threads >= 1, "num_threads", num_threads, "at least 1")
        self.passages = Passages(index_dir)
        self._analyzer = Analyzer(settings)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        index = bm25s.BM25.load(index_dir, mmap=True, auto_compile=False, show_progress=False)
        self._numbers = index.vocab_dict
        # Plain arrays over the maps: a memmap object is another type to numba, and so another compilation.
        data, indices, indptr = (np.asarray(index.scores[name]) for name in ("data", "indices", "indptr"))
        self._best_rows = partial(best_rows, data, indices, indptr, len(self.passages))

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        if not queries:
            return []
        terms = (self._analyzer.terms(query) for query in queries)
        ids = [[self._numbers[term] for term in query if term in self._numbers] for query in terms]
        count = min(top_k, len(self.passages))
        size = max(1, -(-len(ids) // self._num_threads))
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        run = self._threads.map if self._threads else map
        try:
            found = run(lambda part: self._best_rows(part, count), parts)
            return [hits for rows, scores in found for hits in self.passages.hits(rows, scores)]
        except (OSError, MemoryError, ValueError) as error:
            raise RetrievalError(f"bm25: the search failed: {type(error).__name__}: {error}") from error
