"""How good a reward model is on trajectories that it did not learn from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from tasks.records.schema import Count, Number, Share, row

QUALITY = "quality.json"
NUM_BINS = 10
Auc = Annotated[Number | None, Field(ge=0, le=1)]
"""Chance that a positive case has the larger score; null where there is no positive or no negative one."""


@dataclass(frozen=True)
class Judged:
    """What the model says about one trajectory, and what is true.

    Attributes:
        probabilities: at each place: after the question, after each search, at the end.
        pivots: of each search.
        is_right: whether the answer is right.
        hops: golden hops of the question.
    """

    probabilities: Sequence[float]
    pivots: Sequence[bool]
    is_right: bool
    hops: int


@row
class Bin:
    """One bar of a reliability plot: trajectories whose probability lies in [low, high)."""

    low: Share
    high: Share
    count: Count
    mean: Share
    rate: Share


@row
class AtTurn:
    """The model's probability after so many searches: its mean, the rate of success, and how it orders outcomes."""

    turn: Count
    count: Count
    mean: Share
    rate: Share
    auc: Auc


@row
class ByHops:
    """f(0) beside the rate of success, for questions of so many hops."""

    hops: Count
    count: Count
    mean: Share
    rate: Share


@row
class Quality:
    """Figures of a reward model on some trajectories.

    Attributes:
        num_trajectories, num_searches, num_pivots: what was looked at.
        pivot_auc: chance that a pivot earns more than another search, log f(t) - log f(t-1).
        outcome_auc: chance that a right answer has a larger f(T) than a wrong one.
        ece: expected calibration error of f(T), over ten bins of equal width.
        ece_all: the same of f(t) at all places together.
        reliability: the bins of f(T).
        turns: by number of searches before; 0 is f(0).
        start: f(0) by hops.
    """

    num_trajectories: Count
    num_searches: Count
    num_pivots: Count
    pivot_auc: Auc
    outcome_auc: Auc
    ece: Share
    ece_all: Share
    reliability: list[Bin]
    turns: list[AtTurn]
    start: list[ByHops]


def measure(judged: Sequence[Judged], clamp: float, is_hazard: bool = False) -> Quality:
    """The figures of these trajectories; of a hazard head the chance of success at a place is that of no error so far.

    Raises:
        ValueError: no trajectory.
    """
    if not judged:
        raise ValueError("reward model: no trajectory to measure it on. Raise num_questions in conf/reward_model.")
    judged = [Judged(survivals(one.probabilities), *_truth(one)) for one in judged] if is_hazard else list(judged)
    steps = [pair for one in judged for pair in zip(rewards(one.probabilities, clamp), one.pivots, strict=False)]
    finals = [(one.probabilities[-1], one.is_right) for one in judged]
    everywhere = [(f, one.is_right) for one in judged for f in one.probabilities]
    return Quality(
        num_trajectories=len(judged),
        num_searches=len(steps),
        num_pivots=sum(is_pivot for _, is_pivot in steps),
        pivot_auc=auc(steps),
        outcome_auc=auc(finals),
        ece=calibration_error(finals),
        ece_all=calibration_error(everywhere),
        reliability=list(reliability(finals)),
        turns=list(_by_turn(judged)),
        start=list(_by_hops(judged)),
    )


def _truth(one: Judged) -> tuple[Sequence[bool], bool, int]:
    return one.pivots, one.is_right, one.hops


def rewards(probabilities: Sequence[float], clamp: float) -> list[float]:
    """log f(t) - log f(t-1) for t = 1, 2, ..., with f kept in [clamp, 1 - clamp].

    PiCA Eq. 7 (arXiv 2605.09287; docs/methods/pica.md)

    >>> [round(value, 6) for value in rewards([0.5, 0.0, 0.4, 1.0], 1e-4)]
    [-8.517193, 8.29405, 0.916191]
    """
    logs = [math.log(min(max(f, clamp), 1 - clamp)) for f in probabilities]
    return [after - before for before, after in itertools.pairwise(logs)]


def survivals(hazards: Sequence[float]) -> list[float]:
    """The chance of no error so far, at each place; before the first step it is 1."""
    return list(itertools.accumulate(hazards[1:], lambda s, h: s * (1 - h), initial=1.0))


def auc(cases: Sequence[tuple[float, bool]]) -> float | None:
    """Chance that a positive case has a larger score than a negative one; equal scores count half.

    >>> auc([(0.9, True), (0.1, False), (0.5, True), (0.5, False)])
    0.875
    """
    positives = sum(is_positive for _, is_positive in cases)
    negatives = len(cases) - positives
    if not positives or not negatives:
        return None
    below, wins = 0, 0.0
    for _, tied in itertools.groupby(sorted(cases), key=lambda case: case[0]):
        group = [is_positive for _, is_positive in tied]
        num_positive = sum(group)
        wins += num_positive * (below + (len(group) - num_positive) / 2)
        below += len(group) - num_positive
    return wins / (positives * negatives)


def reliability(cases: Sequence[tuple[float, bool]]) -> Iterator[Bin]:
    """Mean probability and rate of success in each of ten bins that holds anything."""
    for number in range(NUM_BINS):
        inside = [case for case in cases if min(int(case[0] * NUM_BINS), NUM_BINS - 1) == number]
        if inside:
            mean, rate = _means(inside)
            yield Bin(low=number / NUM_BINS, high=(number + 1) / NUM_BINS, count=len(inside), mean=mean, rate=rate)


def calibration_error(cases: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error: |mean probability - rate of success|, weighted by the size of the bin."""
    return sum(one.count / len(cases) * abs(one.mean - one.rate) for one in reliability(cases))


def _by_turn(judged: Sequence[Judged]) -> Iterator[AtTurn]:
    """At the end of a trajectory its last place counts as that after its last search."""
    for turn in range(max(len(one.pivots) for one in judged) + 1):
        cases = [(one.probabilities[turn], one.is_right) for one in judged if len(one.pivots) >= turn]
        mean, rate = _means(cases)
        yield AtTurn(turn=turn, count=len(cases), mean=mean, rate=rate, auc=auc(cases))


def _by_hops(judged: Sequence[Judged]) -> Iterator[ByHops]:
    for hops in sorted({one.hops for one in judged}):
        cases = [(one.probabilities[0], one.is_right) for one in judged if one.hops == hops]
        mean, rate = _means(cases)
        yield ByHops(hops=hops, count=len(cases), mean=mean, rate=rate)


def _means(cases: Sequence[tuple[Any, bool]]) -> tuple[float, float]:
    return sum(f for f, _ in cases) / len(cases), sum(is_right for _, is_right in cases) / len(cases)
