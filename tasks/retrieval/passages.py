"""Passages of an index on disk, written once while streaming and then read one by one through a memory map.

`passages.jsonl` holds one `{id, title, text}` row a line in corpus order, `offsets.npy` [num_passages + 1]
the start of each line. Nothing here loads the corpus; the checksums of both files are in the manifest. Reading a corpus
keeps 8 bytes per passage, a hash of its id, to refuse ids that appear twice.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tasks import store
from tasks.data import records
from tasks.data.ingest import key_of, refuse_repeats
from tasks.store import DataError
from tasks.types import Hit, Passage

ROWS = "passages.jsonl"
OFFSETS = "offsets.npy"


def read_corpus(path: Path) -> Iterator[Passage]:
    """Stream the passages of a corpus file.

    Raises:
        DataError: a row that breaks the schema, no rows at all, or, at the end, an id that two rows have.
    """
    keys = array("Q")
    for passage in records.read_passages(path):
        keys.append(key_of(passage.id))
        yield passage
    if not keys:
        raise DataError(f"{path}: no passages in it, so there is nothing to search. Give at least one row.")
    ordered = np.sort(np.frombuffer(keys, dtype=np.uint64))
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        refuse_repeats(path, set(repeated.tolist()))


def count_passages(path: Path) -> int:
    """The number of passages in a corpus file; it reads all of it and raises as `read_corpus`."""
    return sum(1 for _ in read_corpus(path))


def copy_passages(passages: Iterable[Passage], folder: Path) -> Iterator[Passage]:
    """Pass the passages on while writing them to `folder`; the files are complete when the iterator ends."""
    offsets = array("q", [0])
    with (folder / ROWS).open("wb") as file:
        for passage in passages:
            line = store.dump({"id": passage.id, "title": passage.title, "text": passage.text}).encode() + b"\n"
            file.write(line)
            offsets.append(offsets[-1] + len(line))
            yield passage
    np.save(folder / OFFSETS, np.frombuffer(offsets, dtype=np.int64))


class Passages:
    """Random access to the passages of an index, by row number; safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        # A plain array over the map, because each item of a memmap object costs a microsecond.
        self._offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        with (folder / ROWS).open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def hits(self, rows: npt.NDArray[Any], scores: npt.NDArray[Any]) -> list[list[Hit]]:
        """The passages of rows [Q, n] with scores [Q, n], in the given order."""
        starts, ends = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        return [
            [self._hit(*place) for place in zip(*lines, strict=True)]
            for lines in zip(starts, ends, scores.tolist(), strict=True)
        ]

    def _hit(self, start: int, end: int, score: float) -> Hit:
        fields = orjson.loads(self._bytes[start:end])
        return Hit(fields["id"], score, fields["title"], fields["text"])
