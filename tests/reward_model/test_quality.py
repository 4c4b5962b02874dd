"""Figures of a reward model: against slow definitions and by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reward_model.quality import Judged, auc, calibration_error, measure, reliability, survivals

Cases = list[tuple[float, bool]]


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), max_size=12))
def test_auc_counts_the_pairs_in_order(cases: Cases) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, is_positive in cases if is_positive for b, other in cases if not other]
    assert auc(cases) == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_calibration_by_hand() -> None:
    cases = [(0.05, False), (0.05, True), (0.95, True), (1.0, True)]
    first, last = reliability(cases)
    assert (first.low, first.count, first.mean, first.rate) == (0.0, 2, 0.05, 0.5)
    assert (last.low, last.count, last.mean, last.rate) == (0.9, 2, 0.975, 1.0)
    assert calibration_error(cases) == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)


def test_a_calibrated_model_has_no_calibration_error() -> None:
    draw = random.Random(0)
    cases = [(f, draw.random() < f) for f in (draw.random() for _ in range(40_000))]
    assert calibration_error(cases) < 0.01


def test_figures_of_three_trajectories() -> None:
    found = measure(
        [
            Judged([0.2, 0.4, 0.8, 0.9], [True, True], True, 2),
            Judged([0.3, 0.6, 0.5, 0.1], [True, False], False, 2),
            Judged([0.6, 0.7], [], True, 1),
        ],
        1e-4,
    )
    assert (found.num_trajectories, found.num_searches, found.num_pivots) == (3, 4, 3)
    assert found.pivot_auc == 1.0
    assert found.outcome_auc == 1.0
    assert [(turn.turn, turn.count) for turn in found.turns] == [(0, 3), (1, 2), (2, 2)]
    assert [turn.mean for turn in found.turns] == pytest.approx([1.1 / 3, 0.5, 0.65])
    assert found.ece == pytest.approx((0.1 + 0.1 + 0.3) / 3)  # Of 0.9, 0.1 and 0.7, each in a bin of its own.
    assert found.ece_all == pytest.approx(0.31)  # Ten places; the two of 0.6 share a bin, whose rate is a half.
    assert [(one.hops, one.count, one.mean, one.rate) for one in found.start] == [(1, 1, 0.6, 1.0), (2, 2, 0.25, 0.5)]
    with pytest.raises(ValueError, match="no trajectory to measure it on"):
        measure([], 1e-4)


def test_a_hazard_is_measured_by_its_survival() -> None:
    assert survivals([0.5, 0.1, 0.3, 0.6]) == pytest.approx([1.0, 0.9, 0.63, 0.252])
    found = measure([Judged([0.5, 0.1, 0.3], [True], True, 1), Judged([0.5, 0.9, 0.3], [False], False, 1)], 1e-4, True)
    assert found.pivot_auc == 1.0
