"""Walks the header of a GGUF file with every count bounded by the bytes that are left, before a library trusts it.

The readers of the package gguf and of transformers take memory for whatever a header claims.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by the number of its type."""
STRING, ARRAY = 8, 9
MOST_VALUES = 8_000_000
"""Values in all arrays; the largest vocabularies with their merges have some two million."""
MOST_DEPTH, MOST_DIMENSIONS, MOST_SIZE = 4, 8, 1 << 40


def walk(file: Path) -> None:
    """Follow the header of a file to its end.

    Raises:
        ValueError: it claims more than the file holds, or than any model has.
    """
    with file.open("rb") as opened:
        _Walk(opened).run()


class _Walk:
    def __init__(self, opened: BinaryIO) -> None:
        self._file = opened
        self._left = os.fstat(opened.fileno()).st_size
        self._num_values = 0

    def run(self) -> None:
        self._skip(4)
        version = self._number(4)
        if version not in (2, 3):
            raise ValueError(f"found version {version} of the format, expected 2 or 3")
        num_tensors, num_keys = self._count(8, 24), self._count(8, 13)
        for _ in range(num_keys):
            self._string()
            self._value(self._number(4), 0)
        for _ in range(num_tensors):
            self._tensor()

    def _number(self, size: int) -> int:
        self._take(size)
        return int.from_bytes(self._file.read(size), "little")

    def _count(self, size: int, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = self._number(size)
        if count * least > self._left:
            raise ValueError(f"found a count of {count:,}, and {self._left:,} bytes are left")
        return count

    def _take(self, size: int) -> None:
        if size > self._left:
            raise ValueError(f"the header needs {size:,} bytes more, and {self._left:,} are left")
        self._left -= size

    def _skip(self, size: int) -> None:
        self._take(size)
        self._file.seek(size, os.SEEK_CUR)

    def _string(self) -> None:
        self._skip(self._count(8, 1))

    def _value(self, kind: int, depth: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            self._array(depth + 1)
        elif kind in SIZES:
            self._skip(SIZES[kind])
        else:
            raise ValueError(f"found a value of type {kind}, which the format does not have")

    def _array(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise ValueError(f"found arrays within arrays, more than {MOST_DEPTH} deep")
        kind = self._number(4)
        count = self._count(8, SIZES.get(kind, 8))
        self._num_values += count
        if self._num_values > MOST_VALUES:
            raise ValueError(f"found arrays of {self._num_values:,} values, expected at most {MOST_VALUES:,}")
        if kind in SIZES:
            self._skip(count * SIZES[kind])
            return
        for _ in range(count):
            self._value(kind, depth)

    def _tensor(self) -> None:
        self._string()
        num = self._number(4)
        if not 1 <= num <= MOST_DIMENSIONS:
            raise ValueError(f"found a tensor of {num:,} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = [self._number(8) for _ in range(num)]
        if not 0 < math.prod(shape) <= MOST_SIZE:
            raise ValueError(f"found a tensor of shape {' x '.join(map(str, shape))}")
        self._skip(12)  # The number of its quantisation, and where it begins.
