"""Whether a file is a GGUF file that can be read, told before transformers reads it, whose words for it are riddles.

Its reader is the package gguf, which transformers uses as well. Flipped bits within the weights show in no check of the
format: only a hash finds them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks import gguf_header
from tasks.store import DataError

MAGIC = b"GGUF"
KNOWN = "F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q4_0 or Q4_1"
AGAIN = "Copy or download it again, and compare its size and sha256 with those that its page names."


def check(file: Path) -> None:
    """Refuse a file that is no GGUF file, is cut short, or has a quantisation that nobody here can read.

    Raises:
        DataError: it is one of these; the message says which.
    """
    with file.open("rb") as opened:
        begin = opened.read(len(MAGIC))
    if begin != MAGIC:
        raise DataError(
            f"{file}: found a file that begins with {begin!r}, expected {MAGIC!r}: it is no GGUF file. Name another "
            "file in conf/model, or get this one again: a page that asks for a login may have been saved in its place."
        )
    for name, data, kind in _tensors(file):
        try:
            _values_of_a_row(data, kind)
        except NotImplementedError:
            raise _unknown(file, f"{kind.name} (tensor {name!r:.200})") from None


def num_weights(file: Path) -> int:
    """Numbers in all tensors of a file that `check` accepts."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def _tensors(file: Path) -> Iterator[tuple[str, Any, Any]]:
    """The first tensor of each quantisation: name, bytes, kind.

    Raises:
        DataError: the file cannot be followed to its end, or has a quantisation whose number nobody knows.
    """
    from gguf import GGUFReader

    try:
        gguf_header.walk(file)
        tensors = GGUFReader(file).tensors
    except Exception as error:  # Of a damaged file the reader raises errors of every class.
        reason = " ".join(str(error).split())[:200].rstrip(".")
        if number := re.search(r"(\d+)\W+is not a valid GGMLQuantizationType", reason):
            raise _unknown(file, f"of number {number[1]}") from None
        raise DataError(
            f"{file}: found {file.stat().st_size:,} bytes that cannot be read to the last tensor ({reason}), expected "
            f"a whole GGUF file: it was cut short or is damaged. {AGAIN}"
        ) from None
    for name in (tensor.name for tensor in tensors if not tensor.name.isprintable()):
        raise DataError(f"{file}: a tensor is called {name!r:.200}, expected a name of printable characters. {AGAIN}")
    for kind in dict.fromkeys(tensor.tensor_type for tensor in tensors):
        first = next(tensor for tensor in tensors if tensor.tensor_type == kind)
        yield first.name, first.data, kind


def _values_of_a_row(data: Any, kind: Any) -> None:
    """Read one row, which fails for a quantisation without a reader."""
    from gguf import dequantize

    dequantize(data.reshape(-1, data.shape[-1])[:1], kind)


def _unknown(file: Path, found: str) -> DataError:
    from importlib.metadata import version

    return DataError(
        f"{file}: found the quantisation {found}, which package gguf {version('gguf')} cannot read, expected one that "
        f"it reads, such as {KNOWN}. Take the file of another quantisation of this model."
    )


@contextmanager
def no_bar_in_logs() -> Iterator[None]:
    """Within, transformers shows the progress of its reading on a terminal alone; in a log each update is a line."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    reader.tqdm = functools.partial(bar, disable=None)
    try:
        yield
    finally:
        reader.tqdm = bar
