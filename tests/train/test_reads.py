"""What updates read, against the packed rows that the model is given, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.flops import Read
from tasks.rl.experience import Experience, shared_prefixes
from tasks.shared_prefix import _Packed
from tasks.train.reads import read_by
from tests.engine.test_plain import batch_of


def batch(*texts: list[int], prefixes: list[int]) -> Experience:
    """Samples with prefixes of these lengths; the policy wrote all that follows."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    places = torch.arange(ids.shape[1])
    written = (places >= torch.tensor(prefixes)[:, None]) & (places < lengths[:, None])
    table = torch.zeros(ids.shape)
    return Experience(ids, lengths, written, written, table, tuple("a" * len(texts)), table)


FORKS = batch([7, 8, 1, 2, 3], [7, 8, 1, 2, 4, 5], [7, 8, 6], [9, 9, 1], prefixes=[2, 2, 2, 2])


@pytest.mark.parametrize(
    ("sharing", "positions", "pairs"),
    [
        # The last token of each is not read: 4, 5, 2 and 2 tokens.
        (False, 4 + 5 + 2 + 2, 10 + 15 + 3 + 3),
        # Two prefixes of two tokens (3 pairs); then 2 tokens after 2 (3 + 4 pairs), 3 (3 + 4 + 5), and none.
        (True, 2 + 2 + 2 + 3, 3 + 3 + 7 + 12),
        # The tree: 7 8 1 2 (10 pairs) and 4 below it (5), and 9 9 (3).
        ("longest", 4 + 1 + 2, 10 + 5 + 3),
    ],
)
def test_by_hand(sharing: Any, positions: int, pairs: int) -> None:
    assert read_by(FORKS, [[0, 1, 2, 3]], sharing) == Read(positions, pairs, predicted=3 + 4 + 1 + 1)


@pytest.mark.parametrize("sharing", [True, "longest"])
@pytest.mark.parametrize("plan", [[[0, 1, 2, 3]], [[3, 1], [2, 0]], [[1], [0, 2]]])
def test_it_is_what_the_model_is_given(sharing: Any, plan: list[list[int]]) -> None:
    for experience in (FORKS, batch_of(4)):
        packed = []
        for rows in plan:
            part = experience.rows(rows)
            groups = None if sharing == "longest" else shared_prefixes(part)
            packed.append(_Packed(part.ids, part.lengths, groups))

        found = read_by(experience, plan, sharing)
        assert found.positions == sum(one.ids.numel() for one in packed)
        causal = [
            segment.size * (segment.size + 1) // 2 for one in packed for segment in one.segments if segment.seen is None
        ]
        seen = [int(segment.seen.sum()) for one in packed for segment in one.segments if segment.seen is not None]
        assert found.pairs == sum(causal) + sum(seen)


def test_rows_outside_the_plan_are_not_read() -> None:
    assert read_by(FORKS, [[3]], False) == Read(2, 3, predicted=1)
    assert read_by(FORKS, [], False) == Read(0, 0, predicted=0)
