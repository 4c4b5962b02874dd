"""Exact top-k from an engine that breaks ties arbitrarily."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.retrieval.ranking import best_candidates, top_rows


@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=40, max_size=40), min_size=1, max_size=4),
    top_k=st.integers(1, 60),
    seed=st.integers(0, 9),
)
def test_any_tie_breaking_of_the_engine_gives_corpus_order(scores, top_k, seed):
    table = np.array(scores, dtype=np.float32)
    shuffle = np.random.default_rng(seed).permutation(40)  # The engine's own idea of order among equals.

    def engine(queries, count):
        rows = np.array([shuffle[np.argsort(-table[q][shuffle], kind="stable")][:count] for q in queries])
        return rows, np.array([table[q][r] for q, r in zip(queries, rows, strict=True)])

    for found in (
        top_rows(engine, np.arange(len(table)), top_k, 40),
        best_candidates(engine, np.arange(len(table)), top_k, 40),
    ):
        for row, rows, values in zip(table, *found, strict=True):
            expected = sorted(range(40), key=lambda i: (-row[i], i))[:top_k]
            assert rows.tolist() == expected
            assert values.tolist() == row[expected].tolist()
