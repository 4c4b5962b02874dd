"""The overlong penalty by hand and against a slow second implementation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rewards.overlong import OverlongPenalty
from tests.papers import column
from tests.tiny import hit, play_script, question

PENALTIES = column("dspo", "Length penalty", "generated tokens", "penalty")


@pytest.mark.parametrize(("num_tokens", "wanted"), PENALTIES.items())
def test_golden_penalties(num_tokens: int, wanted: float) -> None:
    """Limit 16, stretch 4."""
    assert OverlongPenalty(16, 4).value(num_tokens) == wanted


def slow_value(limit: int, buffer: int, num_tokens: int) -> float:
    """DAPO's three cases."""
    if num_tokens <= limit - buffer:
        return 0.0
    if num_tokens <= limit:
        return ((limit - buffer) - num_tokens) / buffer
    return -1.0


@given(st.integers(1, 60), st.data())
def test_agrees_with_the_slow_one(limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    penalty = OverlongPenalty(limit, buffer)
    values = [penalty.value(n) for n in range(2 * limit + 2)]
    assert values == pytest.approx([slow_value(limit, buffer, n) for n in range(2 * limit + 2)])
    assert values == sorted(values, reverse=True)


def test_only_the_policys_own_tokens_count(tokenizer: Any) -> None:
    """An observation may be as long as it likes; the value lands on the last generated token."""
    lines = ["<search> Hask </search>", "<answer> Hask </answer>"]
    short = play_script(tokenizer, lines)
    long = play_script(tokenizer, lines, shelf=type("Long", (), {"search": lambda _, q, k: [[hit("Hask " * 99)]]})())
    assert len(long.response_ids) > len(short.response_ids) + 50
    penalty = OverlongPenalty(short.num_generated + 1, 2)
    for score, t in zip(penalty([short, long], [question()] * 2), (short, long), strict=True):
        assert score.placed == ((t.last_generated, -0.5),)
        assert score.outcome == -0.5
        assert score.components == {"overlong": -0.5}


@pytest.mark.parametrize(("limit", "buffer", "wrong"), [(0, 1, "limit"), (10, 0, "buffer"), (10, 11, "buffer")])
def test_bounds(limit: int, buffer: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}="):
        OverlongPenalty(limit, buffer)
