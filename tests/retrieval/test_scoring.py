"""The compiled search of BM25 against a sort of all scores: same rows, same scores, equal scores in corpus order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.retrieval.scoring import _BLOCK, best_rows


def slow(scores: np.ndarray, count: int) -> list[int]:
    """Rows by falling score, then by row."""
    return np.lexsort((np.arange(len(scores)), -scores))[:count].tolist()


@given(st.integers(0, 10**6), st.integers(1, 3 * _BLOCK), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_it_finds_what_a_sort_finds(seed: int, num_rows: int, count: int, levels: int) -> None:
    """With few levels most scores are equal, so that ties stand at the last place and over the ends of blocks."""
    generator = np.random.default_rng(seed)
    count = min(count, num_rows)
    postings = [np.sort(generator.choice(num_rows, generator.integers(0, num_rows + 1), replace=False)) for _ in "ab"]
    indptr = np.cumsum([0, *map(len, postings)])
    indices = np.concatenate(postings).astype(np.int32)
    data = generator.integers(1, levels + 1, len(indices)).astype(np.float32)
    totals = np.zeros(num_rows, dtype=np.float32)
    for place, row in enumerate(indices):
        totals[row] += data[place]

    rows, scores = best_rows(data, indices, indptr, num_rows, [[0, 1]], count)

    assert rows.tolist() == [slow(totals, count)]
    assert scores.tolist() == [totals[slow(totals, count)].tolist()]


@pytest.mark.parametrize("best", sorted({0, 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, 2 * _BLOCK + 6}))
def test_one_high_score_is_found_wherever_it_stands(best: int) -> None:
    num_rows = 2 * _BLOCK + 7
    rows, scores = best_rows(np.ones(1, np.float32), np.array([best], np.int32), np.array([0, 1]), num_rows, [[0]], 1)
    assert (rows.tolist(), scores.tolist()) == ([[best]], [[1.0]])
