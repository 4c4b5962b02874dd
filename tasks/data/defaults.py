"""What a row of own data may leave out or name differently, and how it is filled in; docs/data.md tells users.

A field may be left out of a whole file, not of single rows where others have it: there it was forgotten, and a made-up
value would change results in silence.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.data.records import split_contents
from tasks.records.schema import shown
from tasks.store import DataError, Row, read_jsonl
from tasks.text import normalize

NUM_LOOKED_AT = 1000
"""A file lacks a field if none of its first rows has it."""
PASSAGE, QUESTION = ("id", "title"), ("id", "split")
SPLITS = ("test", "dev", *("train",) * 8)


@dataclass(frozen=True)
class Defaults:
    """Fills the rows of one file.

    Attributes:
        path: the file.
        absent: the fields, of those that may be left out, that the file does not have.
        counts: how often each field was filled in.
    """

    path: Path
    absent: frozenset[str]
    counts: Counter[str]

    @classmethod
    def of(cls, path: Path, fields: Sequence[str], counts: Counter[str], max_bytes: int = 0) -> Defaults:
        """Look which of `fields` the first rows of a file have; faulty rows are passed over."""
        rows = (row for _, row in read_jsonl(path, lambda number, error: None, max_bytes))
        seen = {key for row in itertools.islice(map(_renamed, rows), NUM_LOOKED_AT) for key in row}
        return cls(path, frozenset(fields) - seen if seen else frozenset(), counts)

    def passage(self, row: Row, number: int) -> Row:
        """A complete row of `corpus.jsonl`: `id` by its line, an empty `title`.

        Raises:
            DataError: the row has a field that the first rows of the file lack.
        """
        return self._filled(_renamed(row), {"id": f"line-{number}", "title": ""}, number)

    def question(self, row: Row, number: int) -> Row:
        """A complete row of `questions.jsonl`: also `dataset`, the name of the folder, and `hops`, which rows may lack.

        The split is drawn by the question's normalised text, 8 to 1 to 1, so that a repeated question is in one split,
        and further rows leave the others where they are.

        Raises:
            DataError: as `passage`.
        """
        folder, chain = self.path.absolute().parent.name, row.get("decomposition")
        hops = len(chain) if chain and isinstance(chain, list) else 1
        row = {"dataset": folder, "hops": hops, **_renamed(row)}
        return self._filled(row, {"id": f"{folder}/line-{number}", "split": split_of(row.get("question"))}, number)

    def _filled(self, row: Row, values: Row, number: int) -> Row:
        for name in sorted(self.absent):
            if name in row:
                raise DataError(
                    f"{self.path}: row {number}: field {name!r}: found {shown(row[name])}, but the first rows of the "
                    f"file have none. Give {name!r} to every row, or to none.",
                    "bad_field",
                )
        self.counts.update(self.absent)
        return {**{name: values[name] for name in self.absent}, **row}


def _renamed(row: Row) -> Row:
    """The row with our names for those of FlashRAG and Search-R1: `golden_answers`, `contents`; without `metadata`."""
    row = {key: value for key, value in row.items() if key != "metadata"}
    if "golden_answers" in row and "answers" not in row:
        row["answers"] = row.pop("golden_answers")
    if "contents" in row and "text" not in row:
        contents = row.pop("contents")
        if "title" not in row and isinstance(contents, str):
            title, text = split_contents(contents)
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
