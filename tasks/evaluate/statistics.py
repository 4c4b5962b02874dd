"""Means over questions with 95% bootstrap intervals, and paired differences between two policies.

Everything here is arithmetic on numbers already scored, deterministic for a given seed. It reads no file,
knows no metric by name, and does no significance test: it reports intervals.

The unit that is resampled is the question. When several seeds played the same questions, their scores are
averaged inside each question first, so an interval says how far the mean would move with other questions of
the same kind; the spread between training seeds is not in it and is reported seed by seed instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = Mapping[str, float | None]
"""One metric of one run: question id -> score, None (or NaN) where the metric does not apply."""

LEVEL = 0.95
_MAX_CELLS = 1 << 22  # Resampled counts held at once: 32 MB of float64.

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean over questions and the percentile interval around it.

    Attributes:
        mean: the plain mean; NaN when no question has a value.
        low, high: the 2.5 and 97.5 percentiles of the resampled means; NaN when no question has a value.
        num_questions: questions behind the mean.
        num_ignored: questions left out because they have no value.
    """

    mean: float
    low: float
    high: float
    num_questions: int
    num_ignored: int = 0


def bootstrap_means(values: ArrayLike, num_resamples: int = 2000, seed: int = 0) -> list[Interval]:
    """Mean and 95% percentile interval of every column, resampling rows with replacement.

    All columns see the same resamples. A missing value takes no part: a resampled mean divides by the values
    that were drawn, and a resample that drew none is left out.

    Args:
        values: [Q, M], one row a question, one column a metric; NaN = no value.
        num_resamples: resamples behind each interval.
        seed: of the resampling; the same seed gives the same intervals.

    Returns:
        M intervals.

    Raises:
        ValueError: not two dimensions, no row, an infinite value, or no resample asked for.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"values: found shape {table.shape}, expected [questions >= 1, metrics].")
    if np.isinf(table).any():
        raise ValueError("values: found an infinite score, expected finite numbers or NaN for 'no value'.")
    if num_resamples < 1:
        raise ValueError(f"num_resamples={num_resamples}: expected at least 1.")
    known = ~np.isnan(table)
    filled = np.where(known, table, 0.0)
    means = _resampled_means(filled, known.astype(np.float64), num_resamples, seed)
    return [_interval(filled[:, m], known[:, m], means[:, m]) for m in range(table.shape[1])]


def _resampled_means(filled: Floats, known: Floats, num_resamples: int, seed: int) -> Floats:
    """[R, M] means of R resamples, NaN where a resample drew no value; memory bounded by `_MAX_CELLS`."""
    num_rows = len(filled)
    generator = np.random.default_rng(seed)
    gaps = ~known.all(axis=0)
    chunk = max(1, _MAX_CELLS // num_rows)
    parts = []
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        drawn = generator.integers(num_rows, size=(size, num_rows))
        drawn += np.arange(size)[:, None] * num_rows
        counts = np.bincount(drawn.ravel(), minlength=size * num_rows).reshape(size, num_rows).astype(np.float64)
        drawn_values = np.full((size, filled.shape[1]), float(num_rows))
        drawn_values[:, gaps] = counts @ known[:, gaps]
        totals = np.where(drawn_values > 0, counts @ filled, np.nan)
        parts.append(totals / np.maximum(drawn_values, 1.0))
    # Matrix products may add in another order on another machine; the last bits carry no information.
    means: Floats = np.round(np.concatenate(parts), 12)
    return means


def _interval(filled: Floats, known: NDArray[np.bool_], means: Floats) -> Interval:
    count = int(known.sum())
    if count == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0, len(filled))
    tail = 100 * (1 - LEVEL) / 2
    kept = means[~np.isnan(means)]
    mean = float(filled.sum() / count)
    # A rare value may be drawn by no resample at all; the mean itself is then all that is known.
    low, high = np.percentile(kept, [tail, 100 - tail]) if len(kept) else (mean, mean)
    return Interval(mean, float(low), float(high), count, len(filled) - count)


def bootstrap_mean(values: ArrayLike, num_resamples: int = 2000, seed: int = 0) -> Interval:
    """`bootstrap_means` of one metric; `values` is [Q].

    >>> bootstrap_mean([1.0, 1.0, float("nan")])
    Interval(mean=1.0, low=1.0, high=1.0, num_questions=2, num_ignored=1)
    """
    return bootstrap_means(np.asarray(values, dtype=np.float64).reshape(-1, 1), num_resamples, seed)[0]


def question_means(runs: Sequence[Values]) -> dict[str, float]:
    """Average several runs (seeds) inside each question; NaN where no run has a value.

    Raises:
        ValueError: no run, or the runs did not play the same questions.

    >>> question_means([{"a": 1.0, "b": None}, {"a": 0.0, "b": 0.5}])
    {'a': 0.5, 'b': 0.5}
    """
    _same_questions(runs)
    return {question: _mean_known([run[question] for run in runs]) for question in runs[0]}


def _mean_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else float("nan")


def _same_questions(runs: Sequence[Values]) -> None:
    if not runs:
        raise ValueError("found no run, expected at least one seed.")
    for number, run in enumerate(runs[1:], 1):
        if run.keys() != runs[0].keys():
            odd = sorted(run.keys() ^ runs[0].keys())
            raise ValueError(
                f"run 0 has {len(runs[0])} questions and run {number} has {len(run)}; {odd[0]!r} is in only one. "
                "Expected the same questions in every run: evaluate them again on the same data."
            )


def mean_over_seeds(runs: Sequence[Values], num_resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean over questions of the mean over seeds, resampling questions (a cluster is one question).

    Raises:
        ValueError: no run, no question, or different questions.
    """
    return bootstrap_mean(list(question_means(runs).values()), num_resamples, seed)


def paired_differences(runs: Mapping[int, Values], base: Mapping[int, Values]) -> dict[str, float]:
    """Per question: mean over the seeds of `runs` of (this policy - the base policy of the same seed).

    A question without a value on either side of a seed is left out of that seed; NaN if no seed is left.

    Raises:
        ValueError: `base` lacks a seed, or any two runs did not play the same questions.

    >>> paired_differences({0: {"a": 1.0}, 1: {"a": 1.0}}, {0: {"a": 0.0}, 1: {"a": 1.0}})
    {'a': 0.5}
    """
    missing = sorted(runs.keys() - base.keys())
    if missing:
        raise ValueError(f"the base policy has no run for seeds {missing}, found {sorted(base)}. Evaluate it there.")
    _same_questions([*runs.values(), *(base[seed] for seed in runs)])
    questions = next(iter(runs.values()))
    return {
        question: _mean_known([_minus(run[question], base[seed][question]) for seed, run in runs.items()])
        for question in questions
    }


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def paired_difference(
    runs: Mapping[int, Values], base: Mapping[int, Values], num_resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean and interval of `paired_differences`: the change against the base policy on the same questions."""
    return bootstrap_mean(list(paired_differences(runs, base).values()), num_resamples, seed)


def by_group(
    values: Mapping[str, float], group_of: Mapping[str, Hashable], num_resamples: int = 2000, seed: int = 0
) -> dict[Hashable, Interval]:
    """One interval per group of questions (hop count, dataset), groups in sorted order of their text.

    Args:
        values: question id -> value, e.g. of `question_means` or `paired_differences`.
        group_of: question id -> group; every question of `values` needs one.

    Raises:
        ValueError: a question has no group.
    """
    groups: dict[Hashable, list[float]] = {}
    for question, value in values.items():
        if question not in group_of:
            raise ValueError(f"question {question!r} has no group. Give every question one.")
        groups.setdefault(group_of[question], []).append(value)
    return {group: bootstrap_mean(groups[group], num_resamples, seed) for group in sorted(groups, key=str)}
