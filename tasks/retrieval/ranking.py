"""Exact top-k with equal scores in corpus order, from an engine that breaks ties in any order.

The engine gives a few more rows than needed. If the last of them scores less than the k-th, they contain every row that
ties with the k-th, and can be ordered. Otherwise the engine is asked for more rows.

An approximate engine may miss ties, so it is asked only once, for the same number of rows as long as top_k is below
that number. So the candidates and their order do not depend on top_k.
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
"""Rows that an approximate engine always gives; up to here a smaller top_k gives a prefix of a larger one."""

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
    """As `top_rows`, for an approximate engine, which finds good rows but not always the best ones."""
    wanted = min(top_k, num_rows)
    rows, scores = in_order(*engine(queries, min(max(wanted, CANDIDATES), num_rows)))
    return rows[:, :wanted], scores[:, :wanted]


def in_order(rows: Rows, scores: Scores) -> tuple[Rows, Scores]:
    """Each line of rows [Q, n] and scores [Q, n] by falling score, then by row."""
    order = np.lexsort((rows, -scores), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
