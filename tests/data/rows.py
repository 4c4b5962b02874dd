"""Small valid rows for the tests of this room."""

from __future__ import annotations

import json
from typing import Any

Row = dict[str, Any]


def question(number: int, **changes: Any) -> Row:
    """A valid question; even numbers are train rows, odd ones test rows."""
    split = "test" if number % 2 else "train"
    row = {"id": f"d/{number}", "dataset": "d", "split": split, "question": f"Who is number {number}?", "hops": 1}
    return {**row, "answers": [f"Name {number}"], "gold_passage_ids": ["p1"], "gold_method": "annotated", **changes}


def passage(number: int, **changes: Any) -> Row:
    """A valid passage."""
    return {"id": f"p{number}", "title": f"Title {number}", "text": f"Text {number}.", "datasets": ["d"], **changes}


def lines(rows: list[Row]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)
