"""The papers' printed numbers beside this run's; the table says that models, data and scale differ.

A row of `conf/papers/printed.csv` is one printed cell, of a system that a policy of this project stands for. Nothing is
computed from these numbers, and they never enter `results.csv`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tasks.data.notes import own_split
from tasks.report.table import Results, Section, show
from tasks.store import DataError

FILE = Path("papers") / "printed.csv"
METRICS = ("em", "f1", "subem", "em_f1_mean")


@dataclass(frozen=True)
class Printed:
    """One printed cell, in the order of the columns; `value` is a fraction."""

    policy: str
    paper: str
    table: str
    model: str
    retriever_or_corpus: str
    dataset: str
    metric: str
    value: float


COLUMNS = tuple(field.name for field in fields(Printed))


def read(path: Path) -> list[Printed]:
    """All rows of the file.

    Raises:
        DataError: missing file, other columns, an empty or repeated cell, an unknown metric, or a value outside [0, 1].
    """
    if not path.is_file():
        raise DataError(f"{path}: the file is missing. It is part of the repository; run from the root of the clone.")
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    if not lines or tuple(lines[0]) != COLUMNS:
        raise DataError(f"{path}: row 1: expected the columns {', '.join(COLUMNS)}.")
    rows: list[Printed] = []
    seen: set[tuple[str, ...]] = set()
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}: row {number}"
        rows.append(_row(line, where))
        key = tuple(line[:-1])
        if key in seen:
            raise DataError(f"{where}: {', '.join(key)} stands here a second time.")
        seen.add(key)
    return rows


def _row(line: Sequence[str], where: str) -> Printed:
    if len(line) != len(COLUMNS) or not all(line):
        raise DataError(f"{where}: found {list(line)!r:.200}, expected a text for each of {', '.join(COLUMNS)}.")
    *words, text = line
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise DataError(f"{where}: value={text!r}, expected a fraction from 0 to 1.")
    found = Printed(words[0], words[1], words[2], words[3], words[4], words[5], words[6], value)
    if found.metric not in METRICS:
        raise DataError(f"{where}: metric={found.metric!r}, expected one of {', '.join(METRICS)}.")
    return found


def section(results: Results, rows: Sequence[Printed]) -> Section | None:
    """Every policy of this run that a paper prints, its own line first; None without one, or if the split is ours."""
    if own_split(results.manifest):
        return None
    lines = []
    for policy in results.policies:
        printed = [row for row in rows if row.policy == policy]
        if printed:
            ours = [show(results.find(policy, metric)) for metric in METRICS]
            lines.append([results.title(policy), "this run, all questions", *ours])
            lines += [["", *line] for line in _sources(printed)]
    if not lines:
        return None
    lead = (
        "Lines marked \u201cpaper, other scale\u201d are copied from the papers as printed: models of 3 to 14 billion "
        "parameters, other questions, another corpus. They say what the authors found and are no target for this run. "
        "Where a paper prints an average it stands first."
    )
    header = ["policy", "source", "EM", "F1", "subEM", "mean of EM and F1"]
    shown = [i for i in range(len(header)) if any(line[i] for line in lines)]
    table = [[line[i] for i in shown] for line in [header, *lines]]
    return Section("printed", "Beside the papers' numbers", lead, table[0], table[1:])


def _sources(printed: Sequence[Printed]) -> list[list[str]]:
    """One line a table, model and corpus: in each metric its averages, then its datasets."""
    keys = dict.fromkeys((row.paper, row.table, row.model, row.retriever_or_corpus) for row in printed)
    lines = []
    for key in keys:
        own = [row for row in printed if (row.paper, row.table, row.model, row.retriever_or_corpus) == key]
        paper, number, model, corpus = key
        source = f"paper, other scale: {paper}, Table {number}, {model}; {corpus}"
        lines.append([source, *(_cell([row for row in own if row.metric == metric]) for metric in METRICS)])
    return lines


def _cell(rows: Sequence[Printed]) -> str:
    ordered = sorted(rows, key=lambda row: not row.dataset.startswith("Avg"))
    return ", ".join(f"{row.dataset} {row.value:.3f}" for row in ordered)
