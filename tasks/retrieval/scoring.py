"""The best rows of a bm25s index, compiled by numba. Scores are added as in bm25s; equal ones are in corpus order.

bm25s' own search returns whichever of several equal scores its heap happened to keep, so that ties at the last
place would take a second search. This module is imported by searches only: numba takes half a second to load.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from tasks.retrieval.ranking import Rows, Scores, in_order

_BLOCK = 256
"""Rows that are compared at once with the lowest score of the heap; most blocks hold none above it."""


def best_rows(
    data: Scores, indices: npt.NDArray[np.int32], indptr: Rows, num_rows: int, queries: list[list[int]], count: int
) -> tuple[Rows, Scores]:
    """The `count` best rows of each query, by falling score, then by row.

    Args:
        data, indices, indptr: scores and passages of each term's postings, and where each term's begin.
        num_rows: passages of the index.
        queries: Q lists of term numbers; a term that occurs twice counts twice.
        count: at most `num_rows`.

    Returns:
        rows [Q, count] and scores [Q, count]; a row without any of the terms has score 0.
    """
    starts = np.cumsum([0, *map(len, queries)])
    terms = np.array([term for query in queries for term in query], dtype=np.int64)
    return in_order(*_best_rows(data, indices, indptr, num_rows, terms, starts, count))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _best_rows(data: Any, indices: Any, indptr: Any, num_rows: int, terms: Any, starts: Any, count: int) -> Any:
    num_queries = len(starts) - 1
    best_rows = np.empty((num_queries, count), dtype=np.int64)
    best_scores = np.empty((num_queries, count), dtype=np.float32)
    totals = np.empty(num_rows, dtype=np.float32)
    for query in range(num_queries):
        totals[:] = 0
        for term in terms[starts[query] : starts[query + 1]]:
            for place in range(indptr[term], indptr[term + 1]):
                totals[indices[place]] += data[place]
        rows, scores = best_rows[query], best_scores[query]
        for row in range(count):
            rows[row], scores[row] = row, totals[row]
        for place in range(count // 2 - 1, -1, -1):
            _sink(rows, scores, place)
        for first in range(count, num_rows, _BLOCK):
            if not _any_above(totals[first : first + _BLOCK], scores[0]):
                continue
            for row in range(first, min(first + _BLOCK, num_rows)):
                if totals[row] > scores[0]:  # An equal score further on in the corpus is worse.
                    rows[0], scores[0] = row, totals[row]
                    _sink(rows, scores, 0)
    return best_rows, best_scores


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _any_above(totals: Any, lowest: Any) -> bool:
    """Whether a score is above the lowest. Without a branch in the loop the compiler compares many scores at a time."""
    above = False
    for row in range(len(totals)):
        above |= totals[row] > lowest
    return above


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sink(rows: Any, scores: Any, place: int) -> None:
    """Move a new root down until the root is the worst row again: the last of those with the lowest score."""
    row, score, size = rows[place], scores[place], len(rows)
    while 2 * place + 1 < size:
        child = 2 * place + 1
        other = child + 1
        if other < size and (
            scores[other] < scores[child] or (scores[other] == scores[child] and rows[other] > rows[child])
        ):
            child = other
        if scores[child] > score or (scores[child] == score and rows[child] < row):
            break
        rows[place], scores[place] = rows[child], scores[child]
        place = child
    rows[place], scores[place] = row, score


# Kept on disk, so that a process starts without compiling; where numba finds no folder it may write to, it raises
# RuntimeError, and every process compiles for itself.
for _function in (_any_above, _sink, _best_rows):
    with contextlib.suppress(RuntimeError):
        _function.enable_caching()
