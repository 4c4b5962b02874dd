"""The head of `results.md` for a terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

TABLE = Path("reports/results.md")


def headline(root: Path = Path("."), width: int = 0) -> str:
    """What stands before the first section of `results.md`; empty where there is no such file.

    Prose is wrapped, columns are aligned, and those that do not fit any more are left out.

    Args:
        root: root of the clone.
        width: columns of the terminal; 0 asks it.
    """
    if not (root / TABLE).is_file():
        return ""
    lines, width = [], width or shutil.get_terminal_size((100, 24)).columns
    text = (root / TABLE).read_text(encoding="utf-8").partition("\n## ")[0]
    for block in text.removeprefix("# ").strip().split("\n\n"):
        lines += [*(_aligned(block, width) if block.startswith("|") else textwrap.wrap(block, width)), ""]
    return "\n".join(lines)


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
