"""Files of resume state with their own checksum, so that an incomplete or damaged file is treated as missing.

A seal of 40 bytes, a mark and the sha256 of everything before it, ends the file. Readers of a format that knows
its own length (`.npy`, FAISS) do not see it. Nothing here is part of an index: its files are in the manifest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from tasks import store

State = Literal["whole", "unsealed", "torn", "missing"]

_MARK = b"\nsha256:"
_SEAL = len(_MARK) + hashlib.sha256().digest_size
_BLOCK = 1 << 20


def save(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts one after another and seal them; the file appears only when it is complete."""
    digest = hashlib.sha256()
    with store.replacing(path) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.write(_MARK + digest.digest())


def state(path: Path) -> State:
    """Whether a file is what `save` wrote: `unsealed` ends without a mark, `torn` contradicts its seal."""
    if not path.is_file():
        return "missing"
    left = path.stat().st_size - _SEAL
    if left < 0:
        return "unsealed"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        seal = file.read()
    if not seal.startswith(_MARK):
        return "unsealed"
    return "whole" if seal == _MARK + digest.digest() else "torn"


def read(path: Path) -> bytes:
    """The content of a file without its seal; only for a file whose state is `whole`."""
    return path.read_bytes()[:-_SEAL]
