"""What a run says at its end: the result table in the width of the terminal, and where to look; and its exit code."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path

from flows import STOPPED
from flows.pipeline import Run

TABLE = Path("reports/results.md")
REPORT = Path("reports/index.html")


def close(run: Run) -> int:
    """Say once how a run ended; 0 when every stage is up to date."""
    if run.code is None:
        run.code = _close(run)
    return run.code


def _close(run: Run) -> int:
    if run.stopper.signal is not None:
        print(STOPPED, file=sys.stderr, flush=True)
        return 128 + run.stopper.signal
    if run.problems:
        for problem in run.problems:
            print(f"error: {problem.name}: {problem.message}", file=sys.stderr, flush=True)
        print("Finished stages are kept. Mend the cause and run again; the run goes on from there.", file=sys.stderr)
        return 1
    print(summary(run), flush=True)
    return 0


def summary(run: Run) -> str:
    """The result table, and where to find more."""
    lines = []
    table = run.root / TABLE
    if table.is_file():
        lines += ["", *headline(table.read_text(encoding="utf-8"), shutil.get_terminal_size((100, 24)).columns)]
        lines.append(f"Tables:  {TABLE} (this one and all others)")
    lines.append(f"Done: {run.verdict}.")
    if (run.root / REPORT).is_file():
        lines.append(f"Report:  {REPORT} (open it in a browser; it needs no server)")
    elif table.is_file():
        lines.append(f"Report:  {REPORT} was made on another machine; --force report makes it here")
    if run.changes:
        lines.append("Changed: params.yaml; git checkout params.yaml returns to the committed settings")
    lines.append("Runs:    make ui    (Prefect and MLflow on this machine; prints their addresses)")
    return "\n".join(lines)


def headline(text: str, width: int) -> list[str]:
    """What stands in `results.md` before its first section, as lines of a terminal.

    Prose is wrapped, columns are aligned, and those that do not fit any more are left out.
    """
    lines = []
    for block in text.partition("\n## ")[0].removeprefix("# ").strip().split("\n\n"):
        lines += [*(_aligned(block, width) if block.startswith("|") else textwrap.wrap(block, width)), ""]
    return lines


def _aligned(table: str, width: int) -> list[str]:
    """A Markdown table without its bars: the first column to the left, the others to the right."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    cells = [[cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in row] for row in (rows[0], *rows[2:])]
    kept: list[list[str]] = []
    for column in zip(*cells, strict=True):
        size = max(map(len, column))
        if not kept or sum(len(one[0]) + 2 for one in kept) + size <= width:
            kept.append([one.rjust(size) if kept else one.ljust(size) for one in column])
    return ["  ".join(line).rstrip() for line in zip(*kept, strict=True)]
