"""Encoded passages on disk, as shards of unit vectors that a killed build leaves usable for every index type.

A shard depends on corpus, encoder, `passage_format`, cut, shard and batch size, device and the versions of the
libraries that encode, and on nothing else, so that another index of the same vectors encodes nothing again. Readers
hold one block of rows, never the corpus.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tasks.retrieval import sealed
from tasks.retrieval.encoders import Vectors
from tasks.store import DataError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shards:
    """[N, D] float32 vectors in files of `size` rows each, `shard-000000.npy` the first.

    Attributes:
        folder: of the files.
        num_rows: N.
        dimension: D.
        size: rows of a shard; the last one may have fewer.
    """

    folder: Path
    num_rows: int
    dimension: int
    size: int

    def __len__(self) -> int:
        return math.ceil(self.num_rows / self.size)

    def path(self, number: int) -> Path:
        """The file of shard `number`."""
        return self.folder / f"shard-{number:06d}.npy"

    def rows_of(self, number: int) -> int:
        """Number of rows of that shard."""
        return min(self.size, self.num_rows - number * self.size)

    def is_whole(self, number: int) -> bool:
        """Whether an earlier build has completed this shard. A complete one without a seal gets its seal here."""
        state = sealed.state(self.path(number))
        if state in ("missing", "torn"):
            return False
        try:
            vectors = np.load(self.path(number), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return False
        if vectors.shape != (self.rows_of(number), self.dimension) or vectors.dtype != np.float32:
            return False
        if state == "unsealed":
            if not np.isfinite(vectors).all() or self.path(number).stat().st_size != len(_file(vectors)):
                return False
            sealed.save(self.path(number), _file(vectors))
        return True

    def write(self, number: int, vectors: Vectors) -> None:
        """Write the vectors of shard `number`.

        Raises:
            DataError: a vector is not finite.
        """
        assert vectors.shape == (self.rows_of(number), self.dimension), vectors.shape
        if not np.isfinite(vectors).all():
            raise DataError(f"the encoder gave a vector that is not finite for a passage of {self.path(number).stem}.")
        sealed.save(self.path(number), _file(vectors))

    def read(self, number: int) -> Vectors:
        """[size, D] vectors of one shard."""
        vectors: Vectors = np.load(self.path(number), allow_pickle=False)
        return vectors

    def blocks(self, rows: int) -> Iterator[tuple[int, Vectors]]:
        """(first row, [rows, D]) for all rows in order. The array is reused, so copy rows that are needed later."""
        block, filled, first = np.empty((min(rows, self.num_rows), self.dimension), dtype=np.float32), 0, 0
        for number in range(len(self)):
            shard = self.read(number)
            while len(shard):
                taken = min(len(shard), len(block) - filled)
                block[filled : filled + taken] = shard[:taken]
                shard, filled = shard[taken:], filled + taken
                if filled == len(block):
                    yield first, block
                    first, filled = first + filled, 0
        if filled:
            yield first, block[:filled]

    def take(self, rows: npt.NDArray[np.int64]) -> Vectors:
        """[len(rows), D] vectors of rising row numbers."""
        found = np.empty((len(rows), self.dimension), dtype=np.float32)
        ends = np.searchsorted(rows, np.arange(1, len(self) + 1) * self.size)
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            if end > start:
                found[start:end] = self.read(number)[rows[start:end] - number * self.size]
        return found


def encode_missing(
    shards: Shards, items: Iterable[Item], encode: Callable[[list[Item]], Vectors], watch: Callable[..., Iterable[int]]
) -> None:
    """Encode the shards that are not whole yet, in order; `items` is read to its end.

    Args:
        shards: the files to fill.
        items: N items to encode, in corpus order.
        encode: maps items to [n, D] vectors.
        watch: a `Progress`.
    """
    items = iter(items)
    for number in watch(range(len(shards)), len(shards), "encoding shards"):
        batch = list(itertools.islice(items, shards.rows_of(number)))
        if not shards.is_whole(number):
            shards.write(number, encode(batch))
    rest = sum(1 for _ in items)
    assert not rest, f"{rest} items more than rows"


def _file(vectors: Vectors) -> memoryview:
    buffer = io.BytesIO()
    np.save(buffer, vectors)
    return buffer.getbuffer()
