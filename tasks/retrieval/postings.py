"""Computes BM25 scores of a corpus, sorted by term, without holding the corpus, and writes them in the format of bm25s.

Passages are counted chunk by chunk into scratch, each chunk sorted by term and sealed, so that a killed build goes
on after its last chunk. The chunks are then merged, a range of terms at a time, into the arrays of bm25s. In memory
are one chunk, one range, the vocabulary, and 4 bytes a passage.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from tasks.retrieval import Progress, sealed, silent
from tasks.types import Passage

Ints = npt.NDArray[np.int32]

CHUNK_PASSAGES, CHUNK_TOKENS = 65_536, 1 << 22
"""A chunk ends with the passage that reaches one of these numbers."""

RANGE_POSTINGS = 1 << 23
"""Postings merged at a time; a term with more postings is merged alone."""

DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"


class Vocabulary:
    """Numbers the terms in the order of their first appearance; each different word is stemmed once."""

    def __init__(self, term: Callable[[str], str | None]) -> None:
        """`term` maps a word to the term it is indexed under, or to None for a stop word."""
        self.numbers: dict[str, int] = {"": 0}  # bm25s needs a term, even if no passage has one.
        self._term = term
        self._of_word: dict[str, int] = {}  # -1: a stop word
        self._new: list[str] = []

    def of(self, words: list[str]) -> list[int]:
        """Term numbers of the indexed words, with repetitions."""
        known = self._of_word.get
        found = []
        for word in words:
            number = known(word)
            if number is None:
                number = self._add(word)
            if number >= 0:
                found.append(number)
        return found

    def _add(self, word: str) -> int:
        term = self._term(word)
        number = -1 if term is None else self.numbers.setdefault(term, len(self.numbers))
        self._of_word[word] = number
        self._new.append(word)
        return number

    def new_words(self) -> list[str]:
        """New words since the last call, in order; given to `of`, they produce the same numbers again."""
        new, self._new = self._new, []
        return new


@dataclass(frozen=True)
class Chunk:
    """One sealed chunk, int32: three counts, then lengths [rows], terms [T], postings a term [T], docs and tfs [P].

    Attributes:
        path: its file.
        rows, num_terms, num_postings: passages, different terms, and (term, passage) pairs in it.
    """

    path: Path
    rows: int
    num_terms: int
    num_postings: int

    @cached_property
    def lengths(self) -> Ints:
        """[rows] tokens of each passage."""
        return self._read(3, self.rows)

    @cached_property
    def terms(self) -> Ints:
        """[T] the terms in it, rising."""
        return self._read(3 + self.rows, self.num_terms)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[T + 1] where the postings of each term begin."""
        counts = self._read(3 + self.rows + self.num_terms, self.num_terms)
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def postings(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Passages and term frequencies of postings start to end."""
        docs = 3 + self.rows + 2 * self.num_terms
        return self._read(docs + start, end - start), self._read(docs + self.num_postings + start, end - start)

    def _read(self, start: int, count: int) -> Ints:
        return np.fromfile(self.path, dtype="<i4", count=count, offset=4 * start)


def count_chunks(
    passages: Iterable[Passage], words: Callable[[Passage], list[str]], vocabulary: Vocabulary, folder: Path
) -> list[Chunk]:
    """Count the terms of every passage; chunks that are complete in `folder` are not counted again.

    Args:
        passages: the corpus, which is always read to its end.
        words: a passage's words as they are counted.
        vocabulary: empty; filled as if every chunk had been counted now.
        folder: resume state of exactly this corpus and analysis.
    """
    chunks: list[Chunk] = []
    iterator, first = iter(passages), 0
    while True:
        path, words_path = (folder / f"{name}-{len(chunks):06d}.bin" for name in ("chunk", "words"))
        chunk = _earlier(path, words_path)
        if chunk is not None:
            vocabulary.of(sealed.read(words_path).decode().splitlines())
            vocabulary.new_words()
            taken = sum(1 for _ in zip(range(chunk.rows), iterator, strict=False))
            assert taken == chunk.rows, (taken, chunk.rows)
        else:
            chunk = _count(iterator, words, vocabulary, first, path, words_path)
            if chunk is None:
                return chunks
        chunks.append(chunk)
        first += chunk.rows


def _earlier(path: Path, words_path: Path) -> Chunk | None:
    if sealed.state(path) != "whole" or sealed.state(words_path) != "whole":
        return None
    return Chunk(path, *np.fromfile(path, dtype="<i4", count=3).tolist())


def _count(
    passages: Iterator[Passage], words: Callable[[Passage], list[str]], vocabulary: Vocabulary, first: int,
    path: Path, words_path: Path,
) -> Chunk | None:  # fmt: skip
    flat, lengths = array("i"), array("i")
    for passage in passages:
        numbers = vocabulary.of(words(passage))
        flat.extend(numbers)
        lengths.append(len(numbers))
        if len(lengths) == CHUNK_PASSAGES or len(flat) >= CHUNK_TOKENS:
            break
    if not lengths:
        return None
    rows = np.frombuffer(lengths, dtype=np.int32)
    docs = np.repeat(np.arange(first, first + len(rows), dtype=np.int64), rows)
    # The term is in the upper half of a key and the passage in the lower, so that sorting orders by both. Equal keys
    # are repetitions of a term in a passage.
    keys = np.frombuffer(flat, dtype=np.int32).astype(np.int64) << 32 | docs if len(flat) else docs
    keys, tfs = np.unique(keys, return_counts=True)
    terms, counts = np.unique(keys >> 32, return_counts=True)
    sealed.save(words_path, "\n".join(vocabulary.new_words()).encode())
    parts = [np.array([len(rows), len(terms), len(keys)]), rows, terms, counts, keys & 0xFFFFFFFF, tfs]
    sealed.save(path, *(part.astype("<i4").data for part in parts))
    return Chunk(path, len(rows), len(terms), len(keys))


def write_scores(
    chunks: list[Chunk], num_terms: int, k1: float, b: float, out: Path, progress: Progress = silent
) -> None:
    """Write the three arrays of bm25s' index (Lucene variant, float32) for these chunks into `out`.

    The arithmetic is that of bm25s 0.3: idf in double precision, rounded to float32; the rest in double precision,
    rounded once.
    BM25 Section 3 (doi 10.1561/1500000019; docs/methods/search.md)
    BM25S Section 2 (arXiv 2407.03618; docs/methods/search.md)
    """
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    document_frequencies = np.zeros(num_terms, dtype=np.int64)
    for chunk in chunks:
        document_frequencies[chunk.terms] += np.diff(chunk.starts)
    pointers = np.concatenate([[0], np.cumsum(document_frequencies)])
    idf = _idf(document_frequencies, len(lengths))
    mean = lengths.sum(dtype=np.int64) / len(lengths)
    total = int(pointers[-1])
    with _array_file(out / DATA, "<f4", total) as data, _array_file(out / INDICES, "<i4", total) as indices:
        for start, end in progress(_ranges(pointers), -(-total // RANGE_POSTINGS), "merging terms"):
            docs, tfs = _merge(chunks, start, end, pointers)
            frequencies = tfs.astype(np.float32)
            saturation = k1 * ((1 - b) + b * lengths[docs] / mean)
            scores = np.repeat(idf[start:end], document_frequencies[start:end]) * (
                frequencies / (saturation + frequencies)
            )
            data.write(scores.astype("<f4").data)
            indices.write(docs.astype("<i4", copy=False).data)
    np.save(out / INDPTR, pointers)


def _idf(document_frequencies: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.float32]:
    """ln(1 + (N - df + 0.5) / (df + 0.5)) of each term, 0 for a term that no passage has.

    BM25S Section 2 (arXiv 2407.03618; docs/methods/search.md)
    """
    different, which = np.unique(document_frequencies, return_inverse=True)
    values = [math.log(1 + (num_rows - df + 0.5) / (df + 0.5)) if df else 0.0 for df in different.tolist()]
    return np.array(values, dtype=np.float32)[which]


def _ranges(pointers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Term ranges that cover all terms, of at most `RANGE_POSTINGS` postings or a single term."""
    start, last = 0, len(pointers) - 1
    while start < last:
        end = int(np.searchsorted(pointers, pointers[start] + RANGE_POSTINGS, side="right")) - 1
        end = max(min(end, last), start + 1)
        yield start, end
        start = end


def _merge(chunks: list[Chunk], start: int, end: int, pointers: npt.NDArray[np.int64]) -> tuple[Ints, Ints]:
    """Passages and frequencies of terms start to end, by term, then by passage."""
    heads = pointers[start:end] - pointers[start]
    total = int(pointers[end] - pointers[start])
    docs, tfs = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    for chunk in chunks:  # Chunks are in corpus order, so the postings of each go behind those of the one before.
        low, high = np.searchsorted(chunk.terms, [start, end]).tolist()
        if low == high:
            continue
        local, counts = chunk.terms[low:high] - start, np.diff(chunk.starts[low : high + 1])
        first, last = int(chunk.starts[low]), int(chunk.starts[high])
        places = np.arange(first, last) + np.repeat(heads[local] - chunk.starts[low:high], counts)
        docs[places], tfs[places] = chunk.postings(first, last)
        heads[local] += counts
    return docs, tfs


@contextlib.contextmanager
def _array_file(path: Path, kind: str, count: int) -> Iterator[IO[bytes]]:
    """A `.npy` file of known length that is written in pieces."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (count,)})
        yield file
