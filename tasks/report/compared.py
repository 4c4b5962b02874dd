"""What DVC compares between two versions of the report: `metrics/`, a file for each system, and `curves.csv`, its plot.

All are functions of the artifacts alone, as `results.csv` is. Git keeps them, so that a fresh clone has a version to
compare with. A file a system, because `dvc metrics show` prints a line for each file.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable
from pathlib import Path

from tasks.report import curves
from tasks.report.table import Results
from tasks.report.training import TrainingRun
from tasks.store import Row, replacing, write_json

METRICS = ("em", "f1", "answer_in_passage", "searches")
COLUMNS = ("system", "seed", "step", "tokens", "validation_em")
DECIMALS = 6  # As in results.csv.


def figures(results: Results, system: str) -> Row:
    """The mean of each metric over all seeds and questions, greedy, with its 95% interval as in the table.

    The interval is a list, `em_interval`: DVC leaves lists out of its tables, which thus have one column a metric.
    """
    found: Row = {}
    for metric in METRICS:
        cell = results.find(system, metric)
        if cell is not None:
            found[metric] = round(cell.value, DECIMALS)
            if cell.ends is not None:
                found[f"{metric}_interval"] = [round(end, DECIMALS) for end in cell.ends]
    return found


def write_metrics(folder: Path, results: Results) -> None:
    """Write `<system>.json` for each system; files of other systems go."""
    shutil.rmtree(folder, ignore_errors=True)
    for system in results.policies:
        write_json(folder / f"{system}.json", figures(results, system))


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
