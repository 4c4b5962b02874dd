"""Filters against golden values and a second rule; signal and success."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.advantages.group import group_normalized
from tasks.rl.filters import share_with_signal
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.filters.mixed_outcomes import MixedOutcomes
from tasks.rl.filters.successful import Successful
from tasks.types import Sample, Scores
from tests.papers import column, golden

CHANCES = column("dspo", "Chance that a group is kept", "success rate", "chance")


def rows(groups: str, values: list[float], penalties: list[float] | None = None) -> tuple[list[Sample], list[Scores]]:
    """One sample a letter; its part `subem`, and an outcome that a penalty may change."""
    penalties = penalties or [0.0] * len(values)
    played = [Sample("q", group, (1,), (2,), (True,), (0.0,)) for group in groups]
    return played, [Scores(v + p, (), {"subem": v}) for v, p in zip(values, penalties, strict=True)]


@pytest.mark.parametrize("case", golden("dspo", "Filter"))
def test_golden_groups(case: dict[str, Any]) -> None:
    kept = MixedOutcomes("subem").keep(*rows("aaaaa", case["rewards"]))
    assert kept == (list(range(5)) if case["kept"] == "yes" else [])
    found = group_normalized(torch.tensor(case["rewards"], dtype=torch.float64), "aaaaa")
    assert found.tolist() == pytest.approx(case["advantages"], abs=1e-6)


@pytest.mark.parametrize(("rate", "wanted"), CHANCES.items())
def test_golden_chance_to_survive(rate: float, wanted: float) -> None:
    """Over all 32 groups of five."""
    chance = 0.0
    for outcomes in itertools.product([0.0, 1.0], repeat=5):
        if MixedOutcomes("subem").keep(*rows("aaaaa", list(outcomes))):
            chance += rate ** sum(outcomes) * (1 - rate) ** (5 - sum(outcomes))
    assert chance == pytest.approx(wanted, abs=1e-6)


some = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0]), st.floats(-1, 0)), max_size=20)


@settings(max_examples=200)
@given(some)
def test_mixed_is_what_the_sum_says(drawn: list[tuple[str, float, float]]) -> None:
    """0 < sum of R < G for a reward of 0 or 1, whatever a length penalty adds; groups stay whole and in order."""
    groups, values, penalties = "".join(g for g, _, _ in drawn), [v for _, v, _ in drawn], [p for _, _, p in drawn]
    sums = {g: sum(v for h, v, _ in drawn if h == g) for g in groups}
    wanted = [i for i, g in enumerate(groups) if 0 < sums[g] < groups.count(g)]
    assert MixedOutcomes("subem").keep(*rows(groups, values, penalties)) == wanted
    scores = torch.tensor(values, dtype=torch.float64)[wanted]
    assert (group_normalized(scores, [groups[i] for i in wanted]) != 0).all()


def test_a_length_penalty_makes_no_group_look_mixed() -> None:
    played, scores = rows("aa", [0.0, 0.0], [0.0, -0.5])
    assert MixedOutcomes("subem").keep(played, scores) == []
    assert share_with_signal(played, scores) == 1.0


def test_rounds() -> None:
    """Only a filter that can drop groups goes on sampling."""
    assert (KeepAll().max_rounds, MixedOutcomes("subem").max_rounds, Successful("em").max_rounds) == (1, 10, 1)
    with pytest.raises(ValueError, match="max_rounds=0"):
        MixedOutcomes("subem", 0)


def test_successful() -> None:
    played, scores = rows("aabb", [1.0, 0.0, 0.99, 1.0])
    assert Successful("subem").keep(played, scores) == [0, 3]
    with pytest.raises(KeyError, match="em"):
        Successful("em").keep(played, scores)
