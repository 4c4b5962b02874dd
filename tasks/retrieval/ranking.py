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
Engine = Callable[[npt.NDArray[Any], int], tuple[Rows, Scores]]

CANDIDATES = 64
"""Rows an approximate engine is always asked for; up to here a smaller top_k is a prefix of a larger one."""

_SPARE = 16
_GROWTH = 8


def top_rows(engine: Engine, queries: npt.NDArray[Any], top_k: int, num_rows: int) -> tuple[Rows, Scores]:
    """The `min(top_k, num_rows)` best rows of each query, by falling score, then by row.

    Args:
        engine: `(queries, n) -> rows [Q, n], scores [Q, n]`, the n best in any order among equals.
        queries: [Q, ...] whatever the engine takes.
        top_k: rows wanted.
        num_rows: rows there are.

    Returns:
        rows and scores, each [Q, min(top_k, num_rows)].
    """
    wanted = min(top_k, num_rows)
    best_rows = np.empty((len(queries), wanted), dtype=np.int64)
    best_scores = np.empty((len(queries), wanted), dtype=np.float32)
    pending, asked = np.arange(len(queries)), min(wanted + _SPARE, num_rows)
    while len(pending):
        rows, scores = in_order(*engine(queries[pending], asked))
        closed = (scores[:, -1] < scores[:, wanted - 1]) | (asked == num_rows)
        best_rows[pending[closed]], best_scores[pending[closed]] = rows[closed, :wanted], scores[closed, :wanted]
        pending, asked = pending[~closed], min(asked * _GROWTH, num_rows)
    return best_rows, best_scores


def best_candidates(engine: Engine, queries: npt.NDArray[Any], top_k: int, num_rows: int) -> tuple[Rows, Scores]:
    """As `top_rows`, of the rows an approximate engine finds, which need only be good ones; it fills every place."""
    wanted = min(top_k, num_rows)
    rows, scores = in_order(*engine(queries, min(max(wanted, CANDIDATES), num_rows)))
    return rows[:, :wanted], scores[:, :wanted]


def in_order(rows: Rows, scores: Scores) -> tuple[Rows, Scores]:
    """Each line of rows [Q, n] and scores [Q, n] by falling score, then by row."""
    order = np.lexsort((rows, -scores), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
