"""Curves by hand: between validations, at an equal budget, and where a run was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.report import curves
from tasks.report.study import complete
from tasks.report.table import Results
from tasks.report.training import read_trainings
from tasks.store import DataError, write_jsonl
from tests.report.small_study import Given, small, validations

CURVE = [(0.0, 0.2), (100.0, 0.6), (200.0, 0.4)]


@pytest.mark.parametrize(
    ("tokens", "em"), [(-5, 0.2), (0, 0.2), (25, 0.3), (100, 0.6), (150, 0.5), (200, 0.4), (900, 0.4)]
)
def test_a_curve_is_straight_between_validations(tokens: float, em: float):
    assert curves.value_at(CURVE, tokens) == pytest.approx(em)


def test_areas_by_hand():
    assert curves.mean_between(CURVE, 0, 200) == pytest.approx((0.4 + 0.5) / 2)
    assert curves.mean_between(CURVE, 50, 150) == pytest.approx((0.5 + 0.55) / 2)  # .4 .6 .5
    assert curves.mean_between(CURVE, 200, 300) == pytest.approx(0.4)
    assert curves.mean_between(CURVE, 50, 50) == pytest.approx(0.4)
    assert curves.drop(CURVE) == pytest.approx(0.2)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)), min_size=1, unique_by=lambda point: point[0]),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_a_mean_lies_between_the_lowest_and_the_highest_validation(
    points: list[tuple[int, int]], start: int, length: int
):
    curve = sorted((float(x), float(y)) for x, y in points)
    mean = curves.mean_between(curve, start, start + length)
    assert min(y for _, y in curve) - 1e-9 <= mean <= max(y for _, y in curve) + 1e-9


def test_all_runs_are_read_off_at_the_smallest_budget(tmp_path: Path):
    long, short = validations((0, 0.0), (100, 0.5), (300, 0.9)), validations((0, 0.0), (200, 0.8))
    results, trainings = small(
        tmp_path,
        {"a-0": Given("1", long), "a-1": Given("1", long), "b-0": Given("1", short), "b-1": Given("1", long)},
    )
    at = curves.window(trainings)
    assert at == curves.Window(0.0, 200.0)
    assert curves.reading(trainings[0], curves.AT_BUDGET, at) == pytest.approx(0.7)
    assert curves.reading(trainings[0], curves.AREA, at) == pytest.approx((0.25 + 0.6) / 2)
    assert curves.reading(trainings[2], curves.EARLY_AREA, at) == pytest.approx((0.8 / 3) / 2)
    whole = complete(results, tmp_path / "artifacts", 100)
    cells = {(c.policy, c.seed, c.metric): c for c in whole.cells if c.mode == "training"}
    assert cells["all", "all", curves.BUDGET].value == 200
    mean = cells["b", "all", curves.AT_BUDGET]
    assert mean.value == pytest.approx(0.75)
    assert (mean.low, mean.high, mean.interval_over) == (None, None, "")
    assert mean.policy_sha256 == "hash of b-0;hash of b-1"
    assert cells["b", "1", curves.AT_BUDGET].value == pytest.approx(0.7)
    section = next(section for section in whole.sections if section.id == "budget")
    assert section.rows[1][1] == "0.750 (0.800, 0.700)"  # Two seeds have no interval worth printing.
    assert "Single seeds stand in parentheses." in section.lead
    line = section.series[1]
    assert line["policy"] == "b"
    assert line["points"][-1] == [200.0, 0.75, 0.7, 0.8]


def test_a_run_that_generates_nothing_is_not_on_this_axis(tmp_path: Path):
    imitated, played = validations((0, 0.1), (0, 0.9)), validations((0, 0.0), (200, 0.8))
    runs = {f"{name}-{seed}": Given("1", rows) for name, rows in (("a", imitated), ("b", played)) for seed in (0, 1)}
    _, trainings = small(tmp_path, runs)
    assert curves.window(trainings) == curves.Window(0.0, 200.0)
    assert curves.points(trainings[0]) == ()
    assert curves.reading(trainings[0], curves.AT_BUDGET, curves.window(trainings)) is None


def test_a_stopped_run_keeps_its_last_value_and_does_not_shorten_the_others(tmp_path: Path):
    stopped = {"stopped": {"step": 1, "reason": "reward fell"}}
    runs = {
        "a-0": Given("1", validations((0, 0.4), (50, 0.1)), stopped),
        "a-1": Given("1", validations((0, 0.4), (90, 0.6)), {"stopped": None}),
    }
    _, trainings = small(tmp_path, runs)
    at = curves.window(trainings)
    assert at == curves.Window(0.0, 90.0)
    assert curves.reading(trainings[0], curves.AT_BUDGET, at) == pytest.approx(0.1)
    assert curves.window(trainings[:1]) == curves.Window(0.0, 50.0)


def test_without_a_validation_before_training_the_latest_first_one_is_the_start(tmp_path: Path):
    late = [{}, {"generated_tokens_total": 30, "validation_em": 0.3}, {"generated_tokens_total": 80}]
    runs = {"a-0": Given("1", late), "a-1": Given("1", [{"validation_em": 0.1}, *validations((60, 0.5))])}
    _, trainings = small(tmp_path, runs)
    assert curves.points(trainings[1]) == ((0.0, 0.1), (60.0, 0.5))
    assert curves.window(trainings) == curves.Window(30.0, 60.0)


def test_runs_without_validation_have_no_curve(tmp_path: Path):
    results, trainings = small(tmp_path, {"a-0": Given("1"), "a-1": Given("1")})
    assert curves.window(trainings) is None
    assert curves.section(results, trainings) is None
    assert list(curves.cells(results, trainings)) == []
    assert "budget" not in {one.id for one in complete(results, tmp_path / "artifacts", 100).sections}


def test_a_missing_file_of_metrics_is_no_curve_and_a_malformed_one_an_error(tmp_path: Path):
    results, _ = small(tmp_path, {"a-0": Given("1"), "a-1": Given("1")})
    path = tmp_path / "artifacts" / "train" / "a-0" / "metrics.jsonl"
    path.unlink()
    assert read_trainings(results.runs, tmp_path / "artifacts")[0].rows == ()
    write_jsonl(path, [{"step": 1, "metrics": {"entropy": "high"}}])
    with pytest.raises(DataError, match=r"metrics\.jsonl: row 1: metrics\.entropy: found 'high', expected a num"):
        read_trainings(results.runs, tmp_path / "artifacts")


def test_the_same_artifacts_give_the_same_cells(results: Results, artifacts: Path):
    assert complete(results, artifacts, 100) == complete(results, artifacts, 100)
