"""Won, lost and right where an answer was shown: all by hand, over two seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.report import pairs
from tasks.report.table import Results
from tests.report.small_study import Given, small

# Four questions: the gold of the last is not all in the corpus; of the third nothing says whether it was shown.
KNOWN: Mapping[str, float | None] = {"q000": 1.0, "q001": 0.5, "q002": 0.0, "q003": None}
SHOWN: Mapping[str, float | None] = {"q000": 1, "q001": 0, "q002": None, "q003": 1}
STARTS = {0: "1100", 1: "0100"}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made, _ = small(tmp_path, {"a-0": Given("1011"), "a-1": Given("1000")})
    runs = []
    for run in made.runs:
        rows = [replace(row, recall=KNOWN[row.question_id], answer_shown=SHOWN[row.question_id])
                for row in run.scores["greedy"]]  # fmt: skip
        if run.policy == "base":
            rows = [replace(row, em=float(digit)) for row, digit in zip(rows, STARTS[run.seed], strict=True)]
        runs.append(replace(run, scores={"greedy": rows}))
    return replace(made, runs=tuple(runs))


def test_every_count_is_the_one_made_by_hand(results: Results) -> None:
    rows = pairs.section(results).rows
    assert [row[:3] for row in rows] == [
        ["all", "4", "base"], ["all", "4", "a"], [pairs.COMPLETE, "3", "base"], [pairs.COMPLETE, "3", "a"],
    ]  # fmt: skip
    base, a, base_known, a_known = ([cell.partition(" [")[0] for cell in row[3:]] for row in rows)
    # Seed 0: 1100 against 1011; seed 1: 0100 against 1000.
    assert base == ["0.375", "", "", "", "1 of 4", "2 of 2"]
    assert a == ["0.500", "+0.125", "3", "2", "3 of 4", "0 of 2"]
    assert base_known == ["0.500", "", "", "", "1 of 2", "2 of 2"]
    assert a_known == ["0.500", "+0.000", "2", "2", "2 of 2", "0 of 2"]


def test_intervals_are_those_of_the_other_tables(tmp_path: Path) -> None:
    results, _ = small(tmp_path, {"a-0": Given("1011"), "a-1": Given("1000")})
    (_, row) = pairs.section(results).rows  # The gold of no question is known: one part.
    em, gain = results.find("a", "em"), results.find("a", "em_minus_base")
    assert em is not None
    assert gain is not None
    assert row[3] == f"{em.value:.3f} [{em.low:.3f}, {em.high:.3f}]"
    assert row[4] == f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    assert row[7:] == ["", ""]


def test_a_second_part_that_is_the_first_is_left_out(results: Results) -> None:
    runs = [replace(run, scores={"greedy": [replace(row, recall=1.0) for row in run.scores["greedy"]]})
            for run in results.runs]  # fmt: skip
    assert {row[0] for row in pairs.section(replace(results, runs=tuple(runs))).rows} == {"all"}
