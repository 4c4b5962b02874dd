"""The head of `results.md` for a terminal, and its table by dataset where there is more than one."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

TABLE = Path("reports/results.md")
BY_DATASET = "## By dataset"
NAMES = ("policy", "dataset")
"""Columns that name a row."""


def headline(root: Path = Path("."), width: int = 0) -> str:
    """What stands before the first section of `results.md`, and its results by dataset; empty without such a file.

    Prose is wrapped and columns are aligned; those that do not fit any more follow below, after those that name a row.

    Args:
        root: root of the clone.
        width: columns of the terminal; 0 asks it.
    """
    if not (root / TABLE).is_file():
        return ""
    lines, width = [], width or shutil.get_terminal_size((100, 24)).columns
    head, *sections = (root / TABLE).read_text(encoding="utf-8").split("\n## ")
    sections = [f"## {section}" for section in sections]
    shown = [head, *(section for section in sections if section.startswith(f"{BY_DATASET}\n"))]
    for block in "\n\n".join(part.lstrip("# ").strip() for part in shown).split("\n\n"):
        lines += [*(_aligned(block, width) if block.startswith("|") else textwrap.wrap(block, width)), ""]
    return "\n".join(lines)


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
