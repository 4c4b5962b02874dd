"""`hops.jsonl` read back: what was written comes out, and a spoilt row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.augment.records import hops_row, read_hops
from tasks.store import DataError, write_jsonl
from tasks.types import Hop

HOPS = (Hop("Who directed it?", "Ann", "p1", ("film director",)), Hop("Where was Ann born?", "Bern", None, ()))


def spoilt(**changes: Any) -> dict[str, Any]:
    row = json.loads(json.dumps(hops_row("q2", HOPS)))
    for name, value in changes.items():
        (row["hops"][1] if name in row["hops"][1] else row)[name] = value
    return row


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hops.jsonl"
    write_jsonl(path, [hops_row("q2", HOPS), hops_row("q1", HOPS[:1])])
    assert read_hops(path) == {"q2": HOPS, "q1": HOPS[:1]}
    assert list(read_hops(path)) == ["q2", "q1"]
    write_jsonl(path, [])
    assert read_hops(path) == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (spoilt(hops=[]), r"field 'hops': found \[\], expected a list of at least 1"),
        (spoilt(hops=[{"question": "a", "answer": "b"}] * 5), "field 'hops': found .*, expected a list of at most 4"),
        (spoilt(hops="x"), "field 'hops': found 'x', expected a list"),
        (spoilt(question_id=" "), "field 'question_id': found ' ', expected text that is not blank"),
        (spoilt(question_id="q1"), "field 'question_id': found 'q1' for the second time"),
        (spoilt(extra=1), "unknown field 'extra'"),
        (spoilt(answer=3), r"hops\[1\]: field 'answer': found 3 \(int\), expected text"),
        (spoilt(queries=None), r"hops\[1\]: field 'queries': found None, expected a list"),
        (spoilt(queries=["of #1"]), r"field 'hops\[1\]': found 'of #1', expected texts in which #k is replaced"),
    ],
)
def test_a_spoilt_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "hops.jsonl"
    write_jsonl(path, [hops_row("q1", HOPS), row])
    with pytest.raises(DataError, match=rf"hops\.jsonl: row 2: {message}"):
        read_hops(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hops\.jsonl: the file is missing"):
        read_hops(tmp_path / "hops.jsonl")
