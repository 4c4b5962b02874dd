"""Passages of an index on disk: written once while streaming, then read one by one through a memory map.

`passages.jsonl` holds one `{id, title, text}` row a line in corpus order, `offsets.npy` [num_passages + 1]
where each line starts. Nothing here loads the corpus; the checksums of both files are in the manifest.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tasks import store
from tasks.data import records
from tasks.store import DataError
from tasks.types import Hit, Passage

ROWS = "passages.jsonl"
OFFSETS = "offsets.npy"


def read_corpus(path: Path) -> Iterator[Passage]:
    """Stream the passages of a corpus file.

    Raises:
        DataError: a row that breaks the schema, or no rows at all.
    """
    empty = True
    for passage in records.read_passages(path):
        empty = False
        yield passage
    if empty:
        raise DataError(f"{path}: no passages in it, so there is nothing to search. Give at least one row.")


def count_passages(path: Path) -> int:
    """How many rows a corpus file has."""
    return sum(1 for _ in store.read_jsonl(path))


def copy_passages(passages: Iterable[Passage], folder: Path) -> Iterator[Passage]:
    """Pass the passages on while writing them to `folder`; complete when the iterator is used up."""
    offsets = [0]
    with (folder / ROWS).open("wb") as file:
        for passage in passages:
            line = store.dump({"id": passage.id, "title": passage.title, "text": passage.text}).encode() + b"\n"
            file.write(line)
            offsets.append(offsets[-1] + len(line))
            yield passage
    np.save(folder / OFFSETS, np.asarray(offsets, dtype=np.int64))


class Passages:
    """Random access to the passages of an index, by row number; safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        with (folder / ROWS).open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def hit(self, row: int, score: float) -> Hit:
        """The passage of that row as a hit."""
        fields = json.loads(self._bytes[int(self._offsets[row]) : int(self._offsets[row + 1])])
        return Hit(passage_id=fields["id"], score=score, title=fields["title"], text=fields["text"])

    def hits(self, rows: Iterable[int], scores: Iterable[float]) -> list[Hit]:
        """One hit a row, in the given order."""
        return [self.hit(int(row), float(score)) for row, score in zip(rows, scores, strict=True)]
