"""The seconds of a step by hand, and what limits many devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.plan.scaling import Speeds, Work, efficiency, step_seconds

SPEEDS = Speeds(
    written=100, read=1000, passed=400, learned=100, exchanged=8000, exchanged_between=800, handed=500, search_s=2
)
WORK = Work(
    written=800, read=4000, rounds=3, passes=800, learned=1600, updates=2, batches=6, weights=1000, handed=2000
)  # fmt: skip


def test_parts_by_hand() -> None:
    alone = {"play": 12, "search": 6, "logprobs": 2, "learn": 16, "exchange": 0, "hand_over": 4}
    assert step_seconds(SPEEDS, WORK, 1) == alone
    # Each of two workers has three micro-batches, after which it sends half of 4,000 bytes twice (all-reduce), and two
    # updates, after which it sends half of them once (all-gather).
    exchange = (3 * 4000 + 2 * 2000) / 8000
    # The stage gets 2,000 bytes of weights, and sends them.
    two = {**alone, "play": 6, "logprobs": 1, "learn": 8, "exchange": exchange, "hand_over": 8}
    assert step_seconds(SPEEDS, WORK, 2) == two


def test_gradients_that_nobody_divides_are_exchanged_once_an_update() -> None:
    found = step_seconds(SPEEDS, replace(WORK, batches=0), 2)["exchange"]
    assert found == (2 * 4000 + 2 * 2000) / 8000


def test_between_hosts_the_slower_link_counts() -> None:
    one, two = (step_seconds(SPEEDS, WORK, devices, per_host=4)["exchange"] for devices in (4, 8))
    # Two reductions in both: two micro-batches a worker, and one, but two updates.
    assert one == pytest.approx((2 * 8000 + 2 * 4000) * 3 / 4 / 8000)
    assert two == pytest.approx((2 * 8000 + 2 * 4000) * 7 / 8 / 800)


def test_what_is_not_divided_limits() -> None:
    shares = [efficiency(SPEEDS, WORK, devices) for devices in (1, 2, 8, 64)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 40 / 64 / 10


H100 = Speeds(
    written=8_000, read=60_000, passed=64_000, learned=16_000, exchanged=200e9, exchanged_between=25e9, handed=0.35e9,
    search_s=3.0,
)  # fmt: skip
"""Assumed for 3 billion weights: learning at 40% of 989 TFLOP/s with layers computed again (8
FLOP a weight and token), forward passes at a quarter of that work, NVLink and one 200 Gbit/s link a GPU, and a core
for each socket through which weights go. One socket's bytes a second alone were measured, here."""
GRPO_3B = Work(
    written=640_000,
    read=3_600_000,
    rounds=3,
    passes=3_600_000,
    learned=3_600_000,
    updates=2,
    batches=220,
    weights=3.1e9,
    handed=6.2e9,
)
"""2,560 rollouts of some 1,400 tokens, 250 of them written, with a reference, in micro-batches of 16,384 tokens."""


def test_the_table_of_the_page_is_computed_so() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
    for devices in (1, 8, 16, 64):
        parts = step_seconds(H100, GRPO_3B, devices)
        cells = [f"{parts[part]:.1f}" for part in ("play", "search", "logprobs", "learn", "exchange", "hand_over")]
        share = efficiency(H100, GRPO_3B, devices)
        row = f"| {devices} | {' | '.join(cells)} | {sum(parts.values()):.0f} | {share:.2f} |"
        assert row in page, row
