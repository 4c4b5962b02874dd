"""The pages of `docs/methods` as tests read them: tables by heading, golden values, citations of places in papers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
_PLACE = r"(?:(?:Eq\.|Section|Table|Appendix|Algorithm) [A-Z0-9]+(?:\.\d+)*|Abstract|Paper|\w+\.(?:py|sh)(?::\d+)?)"
_ID = r"arXiv \d{4}\.\d{5}|doi 10\.\d{4,9}/[^;\s]+|[\w.-]+/[\w.-]+@[0-9a-f]{7}"
CITATION = re.compile(
    rf"(?P<name>[A-Z][\w-]*) (?P<places>{_PLACE}(?:, {_PLACE})*) \((?P<id>{_ID}); docs/methods/(?P<page>\w+)\.md\)"
)
_BREAK = re.compile(r"\s*\n[\s#]*")


@dataclass(frozen=True, order=True)
class Citation:
    """One place of a paper, or of released code, as a file cites it."""

    name: str
    place: str
    id: str
    page: str


@dataclass(frozen=True)
class Table:
    """A table of a page: the heading above it, and its rows by column."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]


def tables(page: str) -> list[Table]:
    """All tables of a page, in order."""
    found: list[Table] = []
    heading, lines = "", []
    for line in [*(PAGES / f"{page}.md").read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if lines:
            columns, _, *rows = lines
            found.append(Table(heading, tuple(columns), tuple(dict(zip(columns, row, strict=True)) for row in rows)))
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def golden(page: str, heading: str) -> list[dict[str, Any]]:
    """The golden values below a heading: numbers and lists as such, everything else as text."""
    (table,) = [table for table in tables(page) if table.heading == heading]
    return [{column: _value(cell) for column, cell in row.items()} for row in table.rows]


def column(page: str, heading: str, key: str, value: str) -> dict[Any, Any]:
    """Two columns of golden values as a mapping."""
    return {row[key]: row[value] for row in golden(page, heading)}


def clip_range(cell: str | float) -> tuple[float, float]:
    """A clip range: `0.2` is both bounds, `0.2/0.28` the lower and the upper one."""
    low, _, high = str(cell).partition("/")
    return float(low), float(high or low)


def citations(text: str) -> list[Citation]:
    """What a file cites, its lines joined."""
    return [
        Citation(match["name"], place, match["id"], match["page"])
        for match in CITATION.finditer(_BREAK.sub(" ", text))
        for place in match["places"].split(", ")
    ]


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell
