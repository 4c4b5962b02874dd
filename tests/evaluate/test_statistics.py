"""Hand-checked means and intervals, coverage, and the edges where a bootstrap goes wrong."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate import statistics
from tasks.evaluate.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_means,
    by_group,
    mean_over_seeds,
    paired_difference,
    paired_differences,
    question_means,
)


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
    assert bootstrap_mean([0.0, 0.0, 1.0], num_resamples=20_000) == Interval(1 / 3, 0.0, 1.0, 3)


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
    assert bootstrap_mean([0.4]) == Interval(0.4, 0.4, 0.4, 1)


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


def test_seeds_are_averaged_inside_a_question():
    first, second = {"a": 1.0, "b": 0.0, "c": None}, {"a": 0.0, "b": 0.0, "c": 0.5}
    assert question_means([first, second]) == {"a": 0.5, "b": 0.0, "c": 0.5}
    assert mean_over_seeds([first, second]).mean == pytest.approx(1 / 3)


def test_a_copied_seed_adds_no_certainty():
    run = {str(i): float(i % 3 == 0) for i in range(90)}
    assert mean_over_seeds([run, run, run]) == mean_over_seeds([run])


def test_seeds_that_played_different_questions_are_refused():
    with pytest.raises(ValueError, match="'b' is in only one"):
        mean_over_seeds([{"a": 1.0}, {"a": 1.0, "b": 0.0}])


def test_difference_pairs_the_same_seed_and_question():
    # Seed 0: a 1-0, b 0-0; seed 1: a 1-1, b 1-0. Inside questions: a .5, b .5; mean .5, no spread at all.
    policy = {0: {"a": 1.0, "b": 0.0}, 1: {"a": 1.0, "b": 1.0}}
    base = {0: {"a": 0.0, "b": 0.0}, 1: {"a": 1.0, "b": 0.0}, 2: {"a": 0.0, "b": 0.0}}
    assert paired_differences(policy, base) == {"a": 0.5, "b": 0.5}
    assert paired_difference(policy, base) == Interval(0.5, 0.5, 0.5, 2)


def test_difference_leaves_out_a_question_without_a_value_on_one_side():
    found = paired_difference({0: {"a": 1.0, "b": None}}, {0: {"a": 0.5, "b": 1.0}})
    assert (found.mean, found.num_questions, found.num_ignored) == (0.5, 1, 1)


def test_pairing_is_tighter_than_two_separate_intervals():
    easy = np.random.default_rng(5).random(200)
    base = {str(i): float(x) for i, x in enumerate(easy)}
    policy = {key: value + 0.1 for key, value in base.items()}
    found = paired_difference({0: policy}, {0: base})
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)


def test_difference_without_the_base_of_that_seed_is_refused():
    with pytest.raises(ValueError, match=r"no run for seeds \[1\]"):
        paired_difference({1: {"a": 1.0}}, {0: {"a": 1.0}})


def test_groups_are_separate_means():
    values = {"a": 1.0, "b": 0.0, "c": 1.0}
    found = by_group(values, {"a": 1, "b": 2, "c": 2})
    assert list(found) == [1, 2]
    assert found[1] == Interval(1.0, 1.0, 1.0, 1)
    assert found[2].mean == 0.5
    with pytest.raises(ValueError, match="has no group"):
        by_group(values, {"a": 1})
