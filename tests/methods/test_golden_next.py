"""Golden values of methods that have no configuration yet, worked out again from the definitions on their pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.papers import golden


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_r_search_format() -> None:
    for row in golden("r_search", "Format reward"):
        searched, answer, evidence = (row[key] == "yes" for key in ("searched", "answer", "evidence"))
        assert row["reward"] == near(0.2 * (evidence or not searched) + 0.2 * answer)


def test_r_search_sum() -> None:
    whole, part = golden("r_search", "Sum")
    assert whole["reward"] == near(1 + 1 + 0.4)
    assert part["reward"] == near(0.8 + 0.5 + 0.4)
