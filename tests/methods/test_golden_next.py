"""Golden values of methods that have no configuration yet, worked out again from the definitions on their pages."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.papers import column, golden


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_slate_rewards() -> None:
    for row in golden("slate", "Rewards"):
        bonus = 0.1 * (4 - row["t"]) / 4 if row["action"] == "answer" else 0
        assert row["reward"] == near(row["think"] + row["query or answer"] + bonus)


def test_slate_chances() -> None:
    for row in golden("slate", "Candidates"):
        weights = [math.exp(advantage / 0.7) for advantage in row["advantages"]]
        assert [weight / sum(weights) for weight in weights] == near(row["chances"])


def test_slate_variance() -> None:
    variance = column("slate", "Variance", "advantage", "variance")
    assert variance["step"] == near(1 - 1 / 5)
    assert variance["trajectory"] == near((1 - 1 / 5) * 4)


def test_r_search_format() -> None:
    for row in golden("r_search", "Format reward"):
        searched, answer, evidence = (row[key] == "yes" for key in ("searched", "answer", "evidence"))
        assert row["reward"] == near(0.2 * (evidence or not searched) + 0.2 * answer)


def test_r_search_sum() -> None:
    whole, part = golden("r_search", "Sum")
    assert whole["reward"] == near(1 + 1 + 0.4)
    assert part["reward"] == near(0.8 + 0.5 + 0.4)
