"""How many questions and queries each step of the stage `augment` kept, for the table and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.store import DataError, Row, read_json

_COUNTS = {
    "questions": ("read", "without_decomposition", "written", "kept"),
    "hops": ("kept", "without_query"),
    "queries": ("written", "blank", "duplicate", "surplus", "checked", "too_few_sources", "kept"),
}


def read_augmentation(path: Path) -> Row:
    """`artifacts/augment/summary.json`, checked.

    Raises:
        DataError: another shape, or a count that is no whole number.
    """
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise DataError(f"{path}: found {type(tree).__name__}, expected a JSON object. {_AGAIN}")
    for name, keys in _COUNTS.items():
        part: Any = tree.get(name)
        for key in keys:
            found = part.get(key) if isinstance(part, dict) else None
            if type(found) is not int or found < 0:
                raise DataError(f"{path}: {name}.{key}={found!r}, expected a count. {_AGAIN}")
    for name, key in (("questions", "rejected"), ("queries", "valid")):
        if not isinstance(tree[name].get(key), dict):
            raise DataError(f"{path}: {name}.{key}={tree[name].get(key)!r}, expected counts by name. {_AGAIN}")
    return tree


_AGAIN = "Run the stage `augment` again."


def funnel(summary: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table, one a step in the order of the work; steps that left nothing out are not shown.

    There is no row where every step left nothing out: `augmentation_line` says so.
    """
    questions, hops, queries = (summary[name] for name in ("questions", "hops", "queries"))
    steps = [
        ("questions", questions["read"]),
        ("- without decomposition", questions["without_decomposition"]),
        *((f"- rejected: {_words(reason)}", count) for reason, count in questions["rejected"].items()),
        ("questions kept", questions["kept"]),
        ("sub-questions", hops["kept"]),
        ("queries written for them", queries["written"]),
        *((f"- {_words(name)}", queries[name]) for name in ("blank", "duplicate", "surplus")),
        ("queries sent to every source", queries["checked"]),
        *((f"valid in {name}", count) for name, count in queries["valid"].items()),
        ("- valid in too few sources", queries["too_few_sources"]),
        ("queries kept", queries["kept"]),
        ("sub-questions left without a query", hops["without_query"]),
    ]
    shown = [] if _is_whole(summary) else [step for step in steps if step[1] or not step[0].startswith("-")]
    return ["step", "count"], [[name, f"{count:,}"] for name, count in shown]


def _is_whole(summary: Row) -> bool:
    """Whether every question and every different query was kept."""
    questions, hops, queries = (summary[name] for name in ("questions", "hops", "queries"))
    valid = {queries["checked"], queries["kept"], *queries["valid"].values()}
    return len(valid) == 1 and questions["read"] == questions["kept"] and not hops["without_query"]


def augmentation_line(summary: Row) -> str:
    """Above the table: who wrote, how many queries a sub-question has, and where nothing was left out, of how much."""
    note = f" Note: {summary['note']}." if isinstance(summary.get("note"), str) else ""
    hops, queries = summary["hops"]["kept"], summary["queries"]["kept"]
    mean = f" {queries / hops:.2f} queries a sub-question." if hops else ""
    read = summary["questions"]["read"]
    whole = f" Nothing was left out of {read:,} questions, {hops:,} sub-questions and {queries:,} different queries."
    return f"Written by {summary.get('writer')}.{mean}{whole * _is_whole(summary)}{note}"


def _words(name: str) -> str:
    return name.replace("_", " ")
