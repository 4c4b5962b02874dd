"""Hand-checked means and intervals, coverage, and the edges where a bootstrap goes wrong."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate import statistics
from tasks.evaluate.statistics import Interval, bootstrap_means, differences, over_seeds
from tests.papers import golden


def bootstrap_mean(values, num_resamples=2000, seed=0, bounds=None):
    """One column."""
    column = np.asarray(values, dtype=np.float64).reshape(-1, 1)
    return bootstrap_means(column, num_resamples, seed, bounds=[bounds])[0]


def test_mean_is_the_plain_mean():
    found = bootstrap_mean([0.0, 1.0, 1.0, 1.0])
    assert found.mean == 0.75
    assert found.num_questions == 4
    assert found.num_ignored == 0


def test_interval_of_three_questions_matches_the_full_enumeration():
    # All 27 equally likely resamples of (0, 0, 1): mean 0 with 8/27, 1/3 with 12/27, 2/3 with 6/27, 1 with 1/27.
    # The lower 2.5% lies in the mass at 0; the top 1/27 = 3.7% is more than 2.5%, so the upper end is 1.
    means = sorted(sum(draw) / 3 for draw in itertools.product([0.0, 0.0, 1.0], repeat=3))
    assert means[0] == 0
    assert means[-1] == 1
    assert bootstrap_mean([0.0, 0.0, 1.0], num_resamples=20_000) == Interval(1 / 3, 0.0, 1.0, 3, over="questions")


def test_interval_has_the_width_that_the_normal_approximation_gives():
    # 100 of 400 right: standard error sqrt(.25 * .75 / 400) = 0.02165, so about 0.25 -+ 0.0424.
    found = bootstrap_mean([1.0] * 100 + [0.0] * 300, num_resamples=20_000)
    assert found.low == pytest.approx(0.2076, abs=0.004)
    assert found.high == pytest.approx(0.2924, abs=0.004)


def test_same_seed_same_interval_and_another_seed_another():
    values = np.random.default_rng(3).random(50)
    assert bootstrap_mean(values, 500, seed=1) == bootstrap_mean(values, 500, seed=1)
    assert bootstrap_mean(values, 500, seed=1) != bootstrap_mean(values, 500, seed=2)


def test_one_question_has_no_width():
    assert bootstrap_mean([0.4]) == Interval(0.4, 0.4, 0.4, 1, over="questions")


def test_equal_scores_have_no_width():
    found = bootstrap_mean([0.25] * 30)
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def test_missing_values_are_ignored_and_counted():
    found = bootstrap_mean([1.0, math.nan, 0.0, math.nan, 1.0])
    assert found.mean == pytest.approx(2 / 3)
    assert (found.num_questions, found.num_ignored) == (3, 2)
    assert 0 <= found.low <= found.mean <= found.high <= 1


def test_only_missing_values_give_nan_not_zero():
    found = bootstrap_mean([math.nan, math.nan])
    assert math.isnan(found.mean)
    assert math.isnan(found.low)
    assert (found.num_questions, found.num_ignored) == (0, 2)


def test_columns_agree_with_one_metric_at_a_time():
    table = np.random.default_rng(0).random((40, 3))
    table[5:25, 1] = math.nan
    assert bootstrap_means(table, 300, 7) == [bootstrap_mean(table[:, m], 300, 7) for m in range(3)]


def test_a_value_that_no_resample_draws_keeps_its_mean():
    found = bootstrap_mean([0.5] + [math.nan] * 5000, num_resamples=1, seed=1)
    assert found.mean == found.low == found.high == 0.5


def test_memory_is_bounded_by_chunks(monkeypatch):
    values = np.random.default_rng(0).random(64)
    whole = bootstrap_mean(values, 300)
    monkeypatch.setattr(statistics, "_MAX_CELLS", 64 * 7)
    assert bootstrap_mean(values, 300) == whole


@pytest.mark.parametrize(
    ("values", "num_resamples", "words"),
    [([], 100, "shape"), ([math.inf], 100, "infinite"), ([1.0], 0, "at least 1")],
)
def test_bad_arguments_are_refused(values, num_resamples, words):
    with pytest.raises(ValueError, match=words):
        bootstrap_mean(values, num_resamples)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_interval_lies_inside_the_range_of_the_scores(values):
    found = bootstrap_mean(values, 200)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9


def test_interval_covers_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(11)
    samples = (generator.random((400, 120)) < 0.4).astype(float)
    covered = sum(
        found.low <= 0.4 <= found.high for found in (bootstrap_mean(row, 400, i) for i, row in enumerate(samples))
    )
    # 400 trials at 95%: standard deviation 1.1 points; the percentile interval at Q=120 is about a point short.
    assert 0.91 <= covered / 400 <= 0.98


@pytest.mark.parametrize(("value", "bounds"), [(0.0, (0, 1)), (1.0, (0, 1)), (0.0, (-1, 1)), (0.25, (0, 1))])
def test_equal_scores_say_what_so_many_questions_exclude(value, bounds):
    """30 of 30 alike: Clopper and Pearson's bound for a share of 0 in 30 is 0.1157 (two-sided, 95%)."""
    found = bootstrap_mean([value] * 30, bounds=bounds)
    assert found.mean == value
    assert found.low == pytest.approx(value - 0.1157 * (value - bounds[0]), abs=1e-4)
    assert found.high == pytest.approx(value + 0.1157 * (bounds[1] - value), abs=1e-4)


def test_bounds_change_nothing_where_scores_differ():
    assert bootstrap_mean([0.0, 1.0] * 9, bounds=(0, 1)) == bootstrap_mean([0.0, 1.0] * 9)


def test_seeds_far_apart_take_the_interval_of_student():
    generator = np.random.default_rng(2)
    runs = np.stack([generator.random(600) < rate for rate in (0.72, 0.76, 0.74)], axis=1).astype(float)
    together, *each = bootstrap_means(runs, over=[[0, 1, 2], [0], [1], [2]], bounds=[(0, 1)] * 4)
    means = [one.mean for one in each]
    assert together.mean == pytest.approx(sum(means) / 3)
    half = 4.303 * float(np.std(means, ddof=1)) / math.sqrt(3)
    assert half > 0.03
    assert (together.low, together.high) == pytest.approx((together.mean - half, together.mean + half))
    assert (each[0].high - each[0].low) / 2 == pytest.approx(1.96 * math.sqrt(0.72 * 0.28 / 600), rel=0.1)
    assert [one.over for one in (together, each[0])] == ["questions and seeds", "questions"]


def test_an_interval_over_seeds_ends_at_the_bounds():
    runs = np.stack([np.arange(10) < count for count in (9, 8, 10)], axis=1).astype(float)
    (found,) = bootstrap_means(runs, 100, over=[[0, 1, 2]], bounds=[(0, 1)])
    (free,) = bootstrap_means(runs, 100, over=[[0, 1, 2]])
    assert free.high == pytest.approx(0.9 + 4.303 * 0.1 / 3**0.5)
    assert (found.low, found.high) == (pytest.approx(free.low), 1.0)


@pytest.mark.parametrize("columns", [[0, 1], [0], [1]], ids=["both seeds", "seed 0", "seed 1"])
def test_two_seeds_or_one_have_the_interval_that_all_resamples_of_questions_give(columns: list[int]):
    """An independent computation: the quantiles of all 5^5 equally likely draws of questions, both seeds together."""
    gains = np.array([[1, 1], [1, 0], [0, -1], [1, 1], [0, 1]], float)  # Paired differences [question, seed].
    by_question = [float(np.mean(row)) for row in gains[:, columns]]
    means = sorted(sum(draw) / 5 for draw in itertools.product(by_question, repeat=5))
    low, high = means[math.floor(0.025 * len(means))], means[math.ceil(0.975 * len(means)) - 1]
    (found,) = bootstrap_means(gains, 40_000, over=[columns], bounds=[(-1, 1)])
    assert found.mean == pytest.approx(sum(by_question) / 5)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.over == "questions"


def test_an_interval_of_two_seeds_is_that_of_their_mean_by_question():
    runs = np.random.default_rng(9).random((60, 2))
    (both,) = bootstrap_means(runs, over=[[0, 1]])
    alone = bootstrap_mean(runs.mean(axis=1))
    assert (both.low, both.high) == pytest.approx((alone.low, alone.high))


@pytest.mark.parametrize(
    ("table", "bounds"),
    [
        ([[0.0], [1.0]], (0, 1)),  # Two questions, one right.
        ([[-1.0], [1.0], [0.0]], (-1, 1)),  # A paired difference.
        ([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], (0, 1)),  # Two seeds of opposite luck exclude something ...
        ([[0.0, 0.5, 1.0]] * 4, (0, 1)),  # ... three with such means do not, by Student's t.
        ([[0.0, 1.0, 2.0]] * 4, (0, 2)),  # A count.
        ([[0.0001, 0.9999, 0.5]] * 4, (0, 1)),
    ],
)
def test_an_interval_that_excludes_nothing_is_none(table: list[list[float]], bounds: tuple[float, float]):
    (found,) = bootstrap_means(table, 4000, over=[range(len(table[0]))], bounds=[bounds])
    (free,) = bootstrap_means(table, 4000, over=[range(len(table[0]))])
    holds_all = free.low <= bounds[0] + 0.001 and free.high >= bounds[1] - 0.001
    assert holds_all == (len(table[0]) != 2)
    assert (found.ends is None, found.over) == (holds_all, "" if holds_all else "questions")
    assert found.text() == f"{free.mean:.3f}" + ("" if holds_all else f" [{free.low:.3f}, {free.high:.3f}]")


@pytest.mark.parametrize("values", [[0.2], [0.2, 0.9], [0.5, 0.5], [0.0, 0.5, 1.0]])
def test_values_of_few_seeds_or_of_seeds_that_exclude_nothing_have_no_interval(values: list[float]):
    found = over_seeds(values, (0.0, 1.0))
    assert (found.mean, found.ends, found.over) == (pytest.approx(sum(values) / len(values)), None, "")
    assert over_seeds([0.5, 0.5, 0.6], (0.0, 1.0)).over == "seeds"


def test_an_interval_over_many_seeds_has_the_width_of_both_sources_of_spread():
    """Variance of the mean: that between seeds over their number, and that of questions over theirs."""
    generator = np.random.default_rng(4)
    seeds, questions = generator.normal(0, 0.1, 20), generator.normal(0, 1, 300)
    (found,) = bootstrap_means(seeds[None, :] + questions[:, None], 4000, over=[range(20)])
    expected = 1.96 * math.sqrt(seeds.var() / 20 + questions.var() / 300)
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("shared", [0.0, 0.8], ids=["own questions", "shared questions"])
@pytest.mark.parametrize("spread", [0.0, 0.05])
@pytest.mark.parametrize("num_seeds", [3])
def test_intervals_of_few_seeds_hold(num_seeds: int, spread: float, shared: float):
    """300 pairs of policies that answer alike in the mean: the interval of their difference contains 0.

    A fifth of 400 questions is answered otherwise, to either side. Seeds move the mean by `spread`; a share of the
    luck of questions is the same for all seeds. At 95% the standard deviation of the covered share is 1.3 points.
    Resampling alone covers 67 to 86% of those whose seeds spread, Student's t alone 76 to 88% where luck is shared.
    """
    generator = np.random.default_rng(6)
    covered = 0
    for trial in range(300):
        effect = generator.normal(0, spread, num_seeds)
        alike = generator.random((400, num_seeds)) < shared
        luck = np.where(alike, generator.random((400, 1)), generator.random((400, num_seeds)))
        gains = (luck < 0.1 + effect / 2).astype(float) - (luck > 0.9 + effect / 2)
        (found,) = bootstrap_means(gains, 200, trial, over=[range(num_seeds)], bounds=[(-1, 1)])
        covered += found.low <= 0 <= found.high
    assert covered / 300 >= 0.93


def test_a_copied_seed_adds_no_certainty():
    run = np.array([float(i % 3 == 0) for i in range(90)])
    one, three = bootstrap_means(np.stack([run] * 3, axis=1), over=[[0], [0, 1, 2]])
    assert three.mean == pytest.approx(one.mean)
    assert (three.low, three.high) == pytest.approx((one.low, one.high))


def test_a_missing_value_of_one_seed_leaves_the_other():
    table = [[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]]
    (found,) = bootstrap_means(table, 50, over=[[0, 1]])
    assert found.mean == pytest.approx(0.75)  # Seed 0: 1/2, seed 1: 1.
    assert (found.num_questions, found.num_ignored) == (2, 1)


def test_difference_pairs_the_same_seed_and_question():
    # Seed 0: a 1-0, b 0-0; seed 1: a 1-1, b 1-0.
    assert differences({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}) == {"a": 1.0, "b": 0.0}
    assert differences({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0}) == {"a": 0.0, "b": 1.0}


def test_difference_leaves_out_a_question_without_a_value_on_one_side():
    found = differences({"a": 1.0, "b": None, "c": 1.0}, {"a": 0.5, "b": 1.0, "c": None})
    assert found["a"] == 0.5
    assert math.isnan(found["b"])
    assert math.isnan(found["c"])


def test_pairing_is_tighter_than_two_separate_intervals():
    base = np.random.default_rng(5).random(200)
    policy = base + 0.1
    paired, alone = bootstrap_means(np.stack([policy - base, policy], axis=1))
    assert paired.low == pytest.approx(0.1)
    assert paired.high == pytest.approx(0.1)
    assert alone.high - alone.low > 0.05


def test_seeds_are_drawn_alike_for_every_interval():
    """Policy and base policy share their seeds' luck, so the difference of their seeds is what spreads."""
    base = np.tile([0.2, 0.6, 0.4], (50, 1))
    runs = np.concatenate([base, base + 0.1], axis=1)
    one, other = bootstrap_means(runs, 200, over=[[0, 1, 2], [3, 4, 5]])
    assert one.high - one.low > 0.3
    assert other.low - one.low == pytest.approx(0.1)
    assert other.high - one.high == pytest.approx(0.1)


def test_runs_that_played_different_questions_are_refused():
    with pytest.raises(ValueError, match="'b' is in only one"):
        differences({"a": 1.0}, {"a": 1.0, "b": 0.0})


@pytest.mark.parametrize("row", golden("statistics", "Intervals over seeds"))
def test_golden_intervals_over_seeds(row: dict[str, Any]) -> None:
    found = over_seeds(row["values"], tuple(row["bounds"]))
    assert (found.mean, found.num_questions) == (row["mean"], len(row["values"]))
    assert (found.low, found.high) == pytest.approx((row["low"], row["high"]), abs=1e-6)


def test_seeds_that_agree_exclude_little_and_one_seed_nothing() -> None:
    almost = over_seeds([0.6, 0.8 - 0.2, 0.1 + 0.5], (-1.0, 1.0))  # Equal but for rounding.
    assert almost.high - almost.low > 1.0
    alone = over_seeds([0.4], (0.0, 1.0))
    assert alone.mean == 0.4
    assert np.isnan([alone.low, alone.high]).all()
    with pytest.raises(ValueError, match="found none, expected one a seed"):
        over_seeds([], (0.0, 1.0))


def test_more_seeds_than_quantiles_take_the_last_one() -> None:
    values = [0.0, 1.0] * 10
    half = 2.228 * float(np.std(values, ddof=1)) / 20**0.5
    found = over_seeds(values, (-1.0, 2.0))
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))
