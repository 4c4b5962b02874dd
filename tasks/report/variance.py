"""What truncated sampling does to the variance of advantages, measured in training (`tasks.train.variance`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tasks.evaluate.statistics import MIN_SEEDS, SAME, over_seeds, shown
from tasks.records import schema
from tasks.records.variance import VarianceRow
from tasks.report.table import Results, Section

FILE = "variance.jsonl"
_POLICIES = {"start": "before training", "trained": "after training"}
_FEWEST = 10  # Questions; an interval of fewer would say nothing.


def section(results: Results, artifacts: Path, num_resamples: int) -> Section | None:
    """A line for each measured policy and turn, None where nothing was measured."""
    rows: list[list[str]] = []
    for policy in results.policies:
        measured = _read(results, artifacts, policy)
        for when, name in _POLICIES.items():
            own = [(seed, row) for seed, row in measured if row.policy == when]
            rows += [[f"{results.title(policy)}, {name}", *line] for line in _lines(own, num_resamples)]
    if not rows:
        return None
    lead = (
        "Variance of centred advantages on the same questions: complete trajectories compared with those of their "
        "question, and candidates for one action compared with each other. SLATE (Theorem 1) bounds the ratio by 1, "
        "and by 1/T where the rewards of T steps are independent and vary alike; T is the mean number of turns here. "
        "Equal tokens: as many complete trajectories as cost the tokens of the candidates. Ratios have 95% intervals "
        "over questions; of three seeds or more the wider of two: both resampled, or Student's over the seeds' ratios."
    )
    header = ["policy", "turn", "questions", "complete", "truncated", "ratio", "ratio at equal tokens", "1/T"]
    return Section("variance", "Variance of advantages", lead, header, rows)


def _read(results: Results, artifacts: Path, policy: str) -> list[tuple[int, VarianceRow]]:
    """All rows of a policy with their seeds."""
    seeds = [run.seed for run in results.runs if run.policy == policy]
    paths = [(seed, artifacts / "train" / f"{policy}-{seed}" / FILE) for seed in seeds]
    return [(seed, row) for seed, path in paths if path.is_file() for _, row in schema.read(VarianceRow, path)]


def _lines(rows: Sequence[tuple[int, VarianceRow]], num_resamples: int) -> list[list[str]]:
    """The cells of each turn that enough questions reached; turn 0, all turns together, comes first."""
    lines = []
    for turn in sorted({row.turn for _, row in rows}):
        own = {(seed, row.question_id): row for seed, row in rows if row.turn == turn}
        both = {key: row for key, row in own.items() if None not in (row.truncated, row.full, row.full_at_tokens)}
        if len(both) >= _FEWEST:
            lines.append(_cells(turn, both, num_resamples))
    return lines


def _cells(turn: int, rows: Mapping[tuple[int, str], VarianceRow], num_resamples: int) -> list[str]:
    table = np.array([[row.truncated, row.full, row.full_at_tokens, row.num_turns] for row in rows.values()], float)
    seeds = np.array([seed for seed, _ in rows])
    truncated, full, _, num_turns = table.mean(0)
    return [
        "all" if turn == 0 else str(turn),
        str(len(rows)),
        f"{full:.3f}",
        f"{truncated:.3f}",
        ratio(table[:, 0], table[:, 1], seeds, num_resamples),
        ratio(table[:, 0], table[:, 2], seeds, num_resamples),
        f"{1 / num_turns:.3f}" if turn == 0 else "",
    ]


def ratio(above: np.ndarray, below: np.ndarray, seeds: np.ndarray, num_resamples: int) -> str:
    """Ratio of the means [rows] with its 95% interval; without one where the lower mean is 0.

    The questions of each seed are resampled. Of `MIN_SEEDS` seeds or more the seeds are, too, and the interval reaches
    at least as far as Student's over their ratios, as for all figures of the report (`tasks.evaluate.statistics`).
    """
    if not below.mean():
        return "no variance"
    groups = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    rng = np.random.default_rng(0)
    picked = np.tile(np.arange(len(groups)), (num_resamples, 1))
    if len(groups) >= MIN_SEEDS:
        picked = rng.integers(len(groups), size=(num_resamples, len(groups)))
    tops, bottoms = np.zeros(num_resamples), np.zeros(num_resamples)
    for place in range(len(groups)):
        for number, group in enumerate(groups):
            own = np.flatnonzero(picked[:, place] == number)
            rows = group[rng.integers(len(group), size=(len(own), len(group)))]
            tops[own] += above[rows].sum(1)
            bottoms[own] += below[rows].sum(1)
    known = tops[bottoms > 0] / bottoms[bottoms > 0]
    low, high = np.percentile(known, [2.5, 97.5])

    each = [above[group].sum() / below[group].sum() for group in groups if below[group].sum() > 0]
    if len(each) >= MIN_SEEDS and max(each) - min(each) > SAME:
        student = over_seeds(each, (0.0, float("inf")))
        low, high = min(low, student.low), max(high, student.high)
    return shown(above.mean() / below.mean(), (low, high))
