"""What DVC compares between two versions of the report: `summary.json`, its metrics, and `curves.csv`, its plot.

Both are functions of the artifacts alone, as `results.csv` is.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from tasks.report import curves
from tasks.report.table import Results
from tasks.report.training import TrainingRun
from tasks.store import Row, replacing, write_json

METRICS = ("em", "f1", "answer_in_passage", "searches")
COLUMNS = ("system", "seed", "step", "tokens", "validation_em")
DECIMALS = 6  # As in results.csv.


def summary(results: Results) -> dict[str, Row]:
    """System -> the mean of each metric over all seeds and questions, greedy, with its 95% interval as in the table.

    The interval is a list, `em_interval`: DVC leaves lists out of its tables, which thus have one column a metric.
    """
    found: dict[str, Row] = {}
    for system in results.policies:
        cells = {metric: results.find(system, metric) for metric in METRICS}
        found[system] = {}
        for metric, cell in cells.items():
            if cell is not None:
                found[system][metric] = round(cell.value, DECIMALS)
                ends = (cell.low, cell.high)
                found[system][f"{metric}_interval"] = [None if end is None else round(end, DECIMALS) for end in ends]
    return found


def write_summary(path: Path, results: Results) -> None:
    """Write `summary.json`."""
    write_json(path, summary(results))


def write_curves(path: Path, trainings: Iterable[TrainingRun]) -> None:
    """Write `curves.csv`: a row for each validation of a training, with the tokens that were generated before it.

    `tokens` is empty where a training generates none, such as supervised fine-tuning.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for training in trainings:
        for step, metrics in training.rows:
            em, tokens = metrics.get("validation_em"), metrics.get(curves.TOKENS, 0 if step == 0 else None)
            if em is not None:
                known = "" if tokens is None else int(tokens)
                rows.writerow([training.policy, training.seed, step, known, f"{em:.{DECIMALS}f}"])
    with replacing(path) as file:
        file.write(text.getvalue().encode())
