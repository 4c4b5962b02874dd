"""Validation curves over generated tokens: every run is measured at the same budget, whatever its steps cost.

Between two validations a curve is a straight line. The common budget is the smallest number of tokens that a
run had generated at its end. A run that the collapse detector stopped does not shorten the budget: its
curve keeps the last value, because the run could only have continued from that policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasks.evaluate.statistics import MIN_SEEDS, over_seeds
from tasks.report.table import ALL, Cell, Results, Section, of_interval, origin, show
from tasks.report.training import TrainingRun
from tasks.store import Row

Point = tuple[float, float]
"""(generated tokens so far, exact match of the validation questions)."""

TOKENS = "generated_tokens_total"
NUM_POINTS = 61  # Of a drawn line.
AT_BUDGET, AREA, EARLY_AREA, DROP, BUDGET = (
    "validation_em_at_budget", "validation_em_area", "validation_em_area_early", "validation_em_drop",
    "common_token_budget",
)  # fmt: skip


def points(training: TrainingRun) -> tuple[Point, ...]:
    """The validations of a run in order; those before training have generated nothing.

    A run that generates nothing at all (supervised fine-tuning) has no place on this axis and so no point.
    """
    found = []
    for step, metrics in training.rows:
        em, tokens = metrics.get("validation_em"), metrics.get(TOKENS, 0 if step == 0 else None)
        if em is not None and tokens is not None:
            found.append((float(tokens), float(em)))
    found.sort(key=lambda point: point[0])
    return tuple(found) if found and found[-1][0] > 0 else ()


def value_at(curve: Sequence[Point], tokens: float) -> float:
    """The curve between two of its points, and before the first and after the last the value there.

    >>> value_at([(0.0, 0.25), (100.0, 0.75)], 50.0)
    0.5
    """
    place = bisect_right(curve, tokens, key=lambda point: point[0])
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def mean_between(curve: Sequence[Point], start: float, end: float) -> float:
    """The area under the curve from `start` to `end`, divided by their distance: the mean of the curve.

    >>> mean_between([(0.0, 0.0), (10.0, 1.0), (20.0, 1.0)], 0.0, 20.0)
    0.75
    """
    if end <= start:
        return value_at(curve, end)
    marks = [start, *(x for x, _ in curve if start < x < end), end]
    area = 0.0
    for left, right in pairwise(marks):
        area += (right - left) * (value_at(curve, left) + value_at(curve, right)) / 2
    return area / (end - start)


def drop(curve: Sequence[Point]) -> float:
    """How far the last validation lies below the best."""
    return max(em for _, em in curve) - curve[-1][1]


@dataclass(frozen=True)
class Window:
    """The tokens over which all runs are compared: from the latest first validation to the common budget."""

    start: float
    budget: float

    @property
    def early(self) -> float:
        """The end of its first third."""
        return self.start + (self.budget - self.start) / 3


def window(trainings: Iterable[TrainingRun]) -> Window | None:
    """The common window of these runs, None where no run has a validation."""
    known = [(training, points(training)) for training in trainings]
    known = [(training, curve) for training, curve in known if curve]
    if not known:
        return None
    whole = [training for training, _ in known if training.stopped is None] or [training for training, _ in known]
    start = max(curve[0][0] for _, curve in known)
    return Window(start, max(start, min(_generated(training) for training in whole)))


def _generated(training: TrainingRun) -> float:
    return max([*training.values(TOKENS), *(tokens for tokens, _ in points(training))])


Reading = Callable[[Sequence[Point], Window], float]

READINGS: Mapping[str, Reading] = {
    AT_BUDGET: lambda curve, at: value_at(curve, at.budget),
    AREA: lambda curve, at: mean_between(curve, at.start, at.budget),
    EARLY_AREA: lambda curve, at: mean_between(curve, at.start, at.early),
    DROP: lambda curve, at: drop(curve),
}
"""Name in `results.csv` -> one number of a run."""


def reading(training: TrainingRun, name: str, at: Window | None) -> float | None:
    """One number of a run's validation curve, None where it has none."""
    curve = points(training)
    return READINGS[name](curve, at) if curve and at is not None else None


def cells(results: Results, trainings: Sequence[TrainingRun]) -> Iterable[Cell]:
    """Every reading of every run, and the mean over seeds of the readings that every seed has."""
    at = window(trainings)
    if at is None:
        return
    runs = {(run.policy, run.seed): run for run in results.runs}
    sha = origin(results.runs)[0]
    yield Cell(ALL, ALL, ALL, ALL, "training", BUDGET, at.budget, None, None, None, sha, "", "")
    for policy in results.policies:
        own = [training for training in trainings if training.policy == policy]
        for name in READINGS:
            found = [(training.seed, reading(training, name, at)) for training in own]
            known = [(seed, value) for seed, value in found if value is not None]
            if not known or len(known) < len(own):
                continue
            mean = over_seeds([value for _, value in known], (0.0, 1.0))
            behind = origin([runs[policy, seed] for seed, _ in known], is_training=True)
            yield Cell(policy, ALL, ALL, ALL, "training", name, *of_interval(mean), None, *behind, mean.over)
            for seed, value in known:
                behind = origin([runs[policy, seed]], is_training=True)
                yield Cell(policy, str(seed), ALL, ALL, "training", name, value, None, None, None, *behind)


def section(results: Results, trainings: Sequence[TrainingRun]) -> Section | None:
    """The readings of every policy with intervals over seeds, and the lines behind them."""
    at = window(trainings)
    if at is None:
        return None
    names = (AT_BUDGET, AREA, EARLY_AREA, DROP)
    trained = [policy for policy in results.policies if any(training.policy == policy for training in trainings)]
    rows = [[results.title(policy), *(_shown(results, policy, name) for name in names)] for policy in trained]
    is_few = len(results.seeds) < MIN_SEEDS
    seeds = "Single seeds stand in parentheses." if is_few else seeds_note(results.seeds)
    series = [line for policy in trained if (line := _line(policy, trainings, at)) is not None]
    lead = (
        f"Greedy play on validation questions, read off at the same number of generated tokens: {at.budget:,.0f}, the "
        "smallest number at the end of a run (stopped runs left out: they keep their last value). Straight lines "
        "between validations (a method of larger steps is looked at later); an area is divided by its length, so that "
        "it reads as a mean. The drop is from the best "
        f"to the last validation. {seeds} In the picture bands reach from the lowest to the "
        "highest seed."
    )
    header = ["policy", "EM at the budget", "area under the curve", "area, first third", "drop from best to last"]
    return Section("budget", "Equal token budget", lead, header, rows, series, ("generated tokens", "validation EM"))


def _shown(results: Results, policy: str, name: str) -> str:
    """The mean with its interval; with the values of its seeds where these are too few for an interval."""
    mean = results.find(policy, name, mode="training")
    if mean is None or len(results.seeds) >= MIN_SEEDS:
        return show(mean)
    each = [show(results.find(policy, name, seed, mode="training"), interval=False) for seed in results.seeds]
    return f"{show(mean, interval=False)} ({', '.join(each)})"


def seeds_note(seeds: Sequence[int]) -> str:
    """How far an interval over so many seeds can be trusted, in words."""
    if len(seeds) < MIN_SEEDS:
        have = "One seed has" if len(seeds) == 1 else f"{len(seeds)} seeds have"
        return (
            f"{have} no interval over seeds: brackets, where there are any, are over questions and do not include the "
            "variance between training runs."
        )
    few = "; with so few seeds it is wide, and where all agree it says only what so few exclude" * (len(seeds) < 10)
    return f"Interval over seeds: 95%, {len(seeds)} seeds, Student's t{few}."


def _line(policy: str, trainings: Sequence[TrainingRun], at: Window) -> Row | None:
    """Mean, lowest and highest seed of a policy at evenly spaced numbers of tokens."""
    lines = [points(training) for training in trainings if training.policy == policy]
    if not all(lines) or at.budget <= at.start:
        return None
    drawn = []
    for i in range(NUM_POINTS):
        x = at.start + (at.budget - at.start) * i / (NUM_POINTS - 1)
        ys = [value_at(curve, x) for curve in lines]
        drawn.append([round(x, 1), *(round(y, 6) for y in (sum(ys) / len(ys), min(ys), max(ys)))])
    return {"policy": policy, "points": drawn}
