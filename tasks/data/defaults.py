"""What a row of own data may leave out or name differently, and how it is filled in; docs/data.md tells users.

A field may be left out of a whole file, not of single rows where others have it: there it was forgotten, and a made-up
value would change results in silence.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.data.records import split_contents
from tasks.records.schema import shown
from tasks.store import DataError, Row, read_jsonl
from tasks.text import normalize, spelled
from tasks.types import require_dataset_name

NUM_LOOKED_AT = 1000
"""A file lacks a field if none of its first rows has it."""
PASSAGE, QUESTION = ("id", "title"), ("id", "split")
SPLITS = ("test", "dev", *("train",) * 8)


@dataclass
class Filled:
    """What was done to rows before they were checked.

    Attributes:
        counts: how often each field was filled in.
        respelled: rows with a text in another spelling than `tasks.text.spelled`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    respelled: int = 0


@dataclass(frozen=True)
class Defaults:
    """Brings the rows of one file into one spelling and fills them.

    Attributes:
        path: the file.
        absent: the fields, of those that may be left out, that the file does not have.
        filled: counts what was done.
    """

    path: Path
    absent: frozenset[str]
    filled: Filled

    @classmethod
    def of(cls, path: Path, fields: Sequence[str], filled: Filled, max_bytes: int = 0) -> Defaults:
        """Look which of `fields` the first rows of a file have; faulty rows are passed over."""
        rows = (row for _, row in read_jsonl(path, lambda number, error: None, max_bytes))
        seen = {key for row in itertools.islice(map(_renamed, rows), NUM_LOOKED_AT) for key in row}
        return cls(path, frozenset(fields) - seen if seen else frozenset(), filled)

    def passage(self, row: Row, number: int) -> Row:
        """A complete row of `corpus.jsonl`: `id` by its line, an empty `title`.

        Raises:
            DataError: the row has a field that the first rows of the file lack.
        """
        return self._complete(_renamed(self._spelled(row)), {"id": f"line-{number}", "title": ""}, number)

    def question(self, row: Row, number: int) -> Row:
        """A complete row of `questions.jsonl`: also `dataset`, the name of the folder, and `hops`, which rows may lack.

        The split is drawn by the question's normalised text, 8 to 1 to 1, so that a repeated question is in one split,
        and further rows leave the others where they are.

        Raises:
            DataError: as `passage`.
        """
        folder, row = spelled(self.path.absolute().parent.name), _renamed(self._spelled(row))
        chain = row.get("decomposition")
        hops = len(chain) if chain and isinstance(chain, list) else 1
        if "hops" not in row and not chain:
            self.filled.counts["hops"] += 1
        if "dataset" not in row:
            self._require_name(folder)
        row = {"dataset": folder, "hops": hops, **row}
        return self._complete(row, {"id": f"{folder}/line-{number}", "split": split_of(row.get("question"))}, number)

    def _require_name(self, folder: str) -> None:
        """Raise the DataError for a folder whose name cannot be that of a dataset."""
        try:
            require_dataset_name(folder)
        except ValueError as error:
            raise DataError(
                f"{self.path}: no row names its dataset, so the folder's name {folder!r} would be it; expected "
                f'{error}. Rename the folder, or give each row a "dataset".',
                "bad_field",
            ) from None

    def _spelled(self, row: Row) -> Row:
        """The row with each text, names and ids too, in the one spelling that all stages compare."""
        found: Row = _respelled(row)
        self.filled.respelled += found != row
        return found

    def _complete(self, row: Row, values: Row, number: int) -> Row:
        for name in sorted(self.absent):
            if name in row:
                raise DataError(
                    f"{self.path}: row {number}: field {name!r}: found {shown(row[name])}, but the first rows of the "
                    f"file have none. Give {name!r} to every row, or to none.",
                    "bad_field",
                )
        self.filled.counts.update(self.absent)
        return {**{name: values[name] for name in self.absent}, **row}


def _respelled(value: Any) -> Any:
    """A value of JSON with each text of it in one spelling."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, list):
        return [_respelled(one) for one in value]
    return {key: _respelled(one) for key, one in value.items()} if isinstance(value, dict) else value


def _renamed(row: Row) -> Row:
    """The row with our names for those of FlashRAG and Search-R1: `golden_answers`, `contents`; without `metadata`."""
    row = {key: value for key, value in row.items() if key != "metadata"}
    if "golden_answers" in row and "answers" not in row:
        row["answers"] = row.pop("golden_answers")
    if isinstance(row.get("title"), str):
        row["title"] = row["title"].strip()
    if "contents" in row and "text" not in row:
        contents = row.pop("contents")
        if "title" not in row and isinstance(contents, str):
            first, line_end, rest = contents.partition("\n")
            title, text = split_contents(f"{first.strip()}{line_end}{rest}")
            title = title.replace('""', '"')  # As DPR's table writes a quotation mark inside quotes.
            return {**row, "title": title, "text": text} if text.strip() else {**row, "title": "", "text": title}
        row["text"] = contents
    return row


def split_of(question: object) -> str:
    """`train`, `dev` or `test` by the text of a question.

    >>> [split_of(text) for text in ("Who wrote Faust?", "Who is the Pope?", "who is pope", "Where is Oslo?")]
    ['train', 'dev', 'dev', 'test']
    """
    digest = hashlib.blake2b(normalize(question if isinstance(question, str) else "").encode(errors="replace"))
    return SPLITS[int.from_bytes(digest.digest()[:8]) % len(SPLITS)]
