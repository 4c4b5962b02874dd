"""The head of `results.md` for a terminal, its table by dataset where there is more than one, and what it all took."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TABLE = Path("reports/results.md")
BY_DATASET = "## By dataset"
NAMES = ("policy", "dataset")
"""Columns that name a row."""


def headline(root: Path = Path("."), width: int = 0) -> str:
    """What stands before the first section of `results.md`, and its results by dataset; empty without such a file.

    A run prints this once, at its end; stage `report` does where no run has started it.

    Prose is wrapped and columns are aligned; those that do not fit any more follow below, after those that name a row.

    Args:
        root: root of the clone.
        width: columns of the terminal; 0 asks it.
    """
    return fitted((root / TABLE).read_text(encoding="utf-8"), width) if (root / TABLE).is_file() else ""


def fitted(text: str, width: int = 0) -> str:
    """The same of the text of a `results.md`."""
    lines, width = [], width or shutil.get_terminal_size((100, 24)).columns
    head, *sections = text.split("\n## ")
    sections = [f"## {section}" for section in sections]
    shown = [head, *(section for section in sections if section.startswith(f"{BY_DATASET}\n"))]
    for block in "\n\n".join(part.lstrip("# ").strip() for part in shown).split("\n\n"):
        lines += [*(_aligned(block, width) if block.startswith("|") else textwrap.wrap(block, width)), ""]
    return "\n".join(lines)


def times(seconds: Mapping[str, float], width: int = 0) -> str:
    """What the stages of a run took, a line for each kind of stage, means over seeds; those below 1% are left out.

    Args:
        seconds: of each stage, by its name in `dvc.yaml`.
        width: columns of the terminal; 0 asks it.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    kinds: dict[str, dict[str, list[float]]] = {}
    for stage, taken in seconds.items():
        kind, _, item = stage.partition("@")
        kinds.setdefault(kind, {}).setdefault(item.rpartition("-")[0], []).append(taken)
    lines = [f"Seconds on this machine, means over seeds (all stages: {sum(seconds.values()):,.0f})"]
    for kind, items in kinds.items():
        means = {name: sum(taken) / len(taken) for name, taken in items.items()}
        shown = [f"{name} {mean:,.0f}".strip() for name, mean in means.items() if mean >= sum(seconds.values()) / 100]
        if shown:
            lines += textwrap.wrap(f"  {kind}: {', '.join(shown)}", width, subsequent_indent="    ")
    return "\n".join(lines) if len(lines) > 1 else ""


def _aligned(table: str, width: int) -> list[str]:
    """A Markdown table without its bars: names to the left, numbers to the right, in as many parts as it takes."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    cells = [[cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in row] for row in (rows[0], *rows[2:])]
    columns = list(zip(*cells, strict=True))
    names = [_padded(column, str.ljust) for column in columns if column[0] in NAMES]
    parts = [list(names)]
    for column in columns[len(names) :]:
        padded = _padded(column, str.rjust)
        used = sum(len(one[0]) + 2 for one in parts[-1])
        if used + len(padded[0]) > width and len(parts[-1]) > len(names):
            parts.append(list(names))
        parts[-1].append(padded)
    lines = (["  ".join(line).rstrip() for line in zip(*part, strict=True)] for part in parts)
    return [line for part in lines for line in ("", *part)][1:]


def _padded(column: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    size = max(map(len, column))
    return [pad(one, size) for one in column]
