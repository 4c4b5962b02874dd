"""What the report reads of a training run: its metrics by step, and how it ended.

Everything is optional: a metric, a file or a key that older artifacts lack is unknown, never zero. Whatever is there
must be well formed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.records import schema
from tasks.records.metrics import MetricRow
from tasks.store import DataError, Row

if TYPE_CHECKING:
    from tasks.report.artifacts import Run


@dataclass(frozen=True)
class TrainingRun:
    """One training run.

    Attributes:
        policy, seed: which.
        rows: (step, metrics), step 0 is the validation before training.
        stopped: {"step", "reason"} where the collapse detector ended the run.
        says_stopped: whether the run tells if it was stopped at all.
        selected_step: best checkpoint by validation, None unknown.
        has_groups: whether several trajectories of a question are compared with one another.
    """

    policy: str
    seed: int
    rows: tuple[tuple[int, Mapping[str, float | None]], ...]
    stopped: Row | None
    says_stopped: bool
    selected_step: int | None
    has_groups: bool

    def values(self, metric: str, third: int | None = None) -> list[float]:
        """Known values of a metric in steps from 1, all of them or those of the first (0) or last (2) third."""
        rows = [metrics for step, metrics in self.rows if step > 0]
        size = max(1, len(rows) // 3)
        part = rows if third is None else rows[:size] if third == 0 else rows[-size:]
        found = [metrics.get(metric) for metrics in part]
        return [float(value) for value in found if value is not None and math.isfinite(value)]

    def first(self, metric: str) -> float | None:
        """The value of the first step, which the start policy played."""
        return next((metrics.get(metric) for step, metrics in self.rows if step > 0), None)

    def mean(self, metric: str, third: int | None = None) -> float | None:
        """Mean of `values`, None without any."""
        found = self.values(metric, third)
        return sum(found) / len(found) if found else None


def read_trainings(runs: Sequence[Run], artifacts: Path) -> tuple[TrainingRun, ...]:
    """The training runs behind the evaluated systems, in their order; a system that does not learn has none.

    Raises:
        DataError: a malformed row of metrics, or a malformed `stopped` or `selected_step`.
    """
    folder = artifacts / "train"
    return tuple(
        _training_run(run, run.training, folder / f"{run.policy}-{run.seed}")
        for run in runs
        if run.training is not None
    )


def _training_run(run: Run, summary: Row, folder: Path) -> TrainingRun:
    path = folder / "metrics.jsonl"
    lines = schema.read(MetricRow, path) if path.is_file() else ()
    rows = tuple((row.step, row.metrics) for _, row in lines)
    stopped, selected = summary.get("stopped"), summary.get("selected_step")
    where = folder / "summary.json"
    if stopped is not None and not (
        isinstance(stopped, dict) and isinstance(stopped.get("step"), int) and isinstance(stopped.get("reason"), str)
    ):
        raise DataError(f"{where}: stopped={stopped!r}, expected null or {{'step': integer, 'reason': text}}.")
    if selected is not None and (not isinstance(selected, int) or isinstance(selected, bool)):
        raise DataError(f"{where}: selected_step={selected!r}, expected null or an integer.")
    size = _group_size(summary)
    signals = any(metrics.get("share_with_signal") for _, metrics in rows)
    return TrainingRun(
        run.policy, run.seed, rows, stopped, "stopped" in summary, selected, signals if size is None else size > 1
    )


def _group_size(summary: Row) -> int | None:
    settings = summary.get("settings")
    method = settings.get("method") if isinstance(settings, dict) else None
    sampler = method.get("sampler") if isinstance(method, dict) else None
    size = sampler.get("size", 1) if isinstance(sampler, dict) else None
    return size if isinstance(size, int) else None
