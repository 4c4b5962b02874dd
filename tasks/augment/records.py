"""Rows of `hops.jsonl` and `rejected.jsonl`: `{question_id, hops: [{question, answer, support_passage_id, queries}]}`.

All texts of a hop are resolved, without any `#k`. A hop without queries stays with an empty list, because rewards are
averaged over all hops.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

from tasks.augment import Rejection
from tasks.data.decomposition import REFERENCE
from tasks.data.records import parsed, wrong_field
from tasks.store import DataError, Row, read_jsonl
from tasks.types import MAX_HOPS, Hop, Text

HOPS, REJECTED, SUMMARY = "hops.jsonl", "rejected.jsonl", "summary.json"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Augmented:
    """One row of `hops.jsonl`."""

    question_id: Text
    hops: Annotated[tuple[Hop, ...], Field(min_length=1, max_length=MAX_HOPS)]


def read_hops(path: Path) -> dict[str, tuple[Hop, ...]]:
    """Question id -> its hops, from `hops.jsonl`.

    Raises:
        DataError: the first row that breaks the schema, by file, row and field; a question twice.
    """
    found: dict[str, tuple[Hop, ...]] = {}
    for number, row in read_jsonl(path):
        one = to_augmented(row, f"{path}: row {number}")
        if one.question_id in found:
            raise DataError(
                f"{path}: row {number}: field 'question_id': found {one.question_id!r} for the second time, expected "
                "one row a question. Run the stage `augment` again."
            )
        found[one.question_id] = one.hops
    return found


def to_augmented(row: Row, where: str) -> Augmented:
    """Check one JSON object and make it an `Augmented`; `where` begins every message.

    Raises:
        DataError: a field is missing, unknown or wrong, or a `#k` is left.
    """
    one = parsed(Augmented, row, where)
    for i, hop in enumerate(one.hops):
        for text in (hop.question, hop.answer, *hop.queries):
            if REFERENCE.search(text):
                expected = "texts in which #k is replaced by the answer it stands for"
                raise wrong_field(where, f"hops[{i}]", text, expected)
    return one


def hops_row(question_id: str, hops: tuple[Hop, ...]) -> Row:
    """The JSON object of a question's hops; `to_augmented` inverts it."""
    return {"question_id": question_id, "hops": [dataclasses.asdict(hop) for hop in hops]}


def rejected_row(question_id: str, rejection: Rejection) -> Row:
    """The JSON object of what was left out."""
    return {"question_id": question_id, **dataclasses.asdict(rejection)}
