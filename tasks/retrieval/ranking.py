"""Exact top-k out of an engine that breaks ties as it likes: equal scores come out in corpus order.

The engine is asked for a few more rows than wanted. When the last of them scores less than the k-th, every row
that ties with the k-th is in hand and can be ordered; otherwise the engine is asked for more.

An approximate engine cannot say that it found every tie, so it is asked once, always for the same number of rows
while top_k is below that: the same candidates, ordered the same way, whatever top_k is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Engine = Callable[[Any, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]

CANDIDATES = 64
"""Rows an approximate engine is always asked for; up to here a smaller top_k is a prefix of a larger one."""

_SPARE = 16
_GROWTH = 8


def top_rows(
    engine: Engine, queries: list[Any], top_k: int, num_rows: int, floor: float | None = None
) -> list[tuple[Rows, Scores]]:
    """The `min(top_k, num_rows)` best rows of each query, by falling score, then by row.

    Args:
        engine: `(queries, n) -> rows [Q, n], scores [Q, n]`, the n best in any order among equals.
        queries: whatever the engine takes, Q of them.
        top_k: rows wanted.
        num_rows: rows there are.
        floor: a score no row is below and most rows have; rows at the floor are filled in without
            asking the engine which ones they are.
    """
    wanted = min(top_k, num_rows)
    results: dict[int, tuple[Rows, Scores]] = {}
    pending, asked = list(range(len(queries))), min(wanted + _SPARE, num_rows)
    while pending:
        rows, scores = engine([queries[i] for i in pending], asked)
        open_ties = []
        for index, found, values in zip(pending, rows, scores, strict=True):
            last = np.sort(values)[-wanted]  # The score of the last row wanted; on ties far faster than np.partition.
            if floor is not None and last <= floor:
                results[index] = _fill(*_best_above(floor, found, values), wanted, floor)
            elif asked == num_rows or values.min() < last:
                best, best_values = _best_above(last, found, values)
                tied = np.sort(found[values == last])[: wanted - len(best)].astype(np.int64)
                results[index] = _join(best, best_values, tied, last)
            else:
                open_ties.append(index)
        pending, asked = open_ties, min(asked * _GROWTH, num_rows)
    return [results[i] for i in range(len(queries))]


def best_candidates(engine: Engine, queries: npt.NDArray[Any], top_k: int, num_rows: int) -> list[tuple[Rows, Scores]]:
    """The `min(top_k, num_rows)` best of the rows an approximate engine finds, by falling score, then by row.

    Args:
        engine: as in `top_rows`, except that its rows need only be good ones; it fills every place.
        queries: [Q, ...] whatever the engine takes.
        top_k: rows wanted.
        num_rows: rows there are.
    """
    wanted = min(top_k, num_rows)
    rows, scores = engine(queries, min(max(wanted, CANDIDATES), num_rows))
    order = np.lexsort((rows, -scores), axis=1)[:, :wanted]
    rows, scores = np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
    return list(zip(rows, scores, strict=True))


def _best_above(score: float, rows: npt.NDArray[Any], scores: npt.NDArray[Any]) -> tuple[Rows, Scores]:
    above = scores > score
    rows, scores = rows[above].astype(np.int64), scores[above].astype(np.float32)
    order = np.lexsort((rows, -scores))
    return rows[order], scores[order]


def _fill(rows: Rows, scores: Scores, wanted: int, floor: float) -> tuple[Rows, Scores]:
    # The first `wanted` rows of the corpus always hold enough that were not found.
    rest = np.setdiff1d(np.arange(wanted, dtype=np.int64), rows)[: wanted - len(rows)]
    return _join(rows, scores, rest, floor)


def _join(rows: Rows, scores: Scores, equal_rows: Rows, score: float) -> tuple[Rows, Scores]:
    return np.append(rows, equal_rows), np.append(scores, np.full(len(equal_rows), score, dtype=np.float32))
