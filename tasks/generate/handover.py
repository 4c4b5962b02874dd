"""Hands weights to another process on this machine through memory, so that a kill leaves no file behind."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tasks.generate import Shapes
from tasks.model import stored_weights

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in the safetensors files of a model folder."""
    return {name: shape for name, (_, shape) in stored_weights(folder).items()}


@contextmanager
def staged(weights: Iterable[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> Iterator[str]:
    """A safetensors file with these weights in memory; its path is valid for processes of this user inside the block.

    One tensor at a time is held besides the file. The file has no name in any folder, so the kernel frees it with the
    last process that holds it, even if this one is killed.

    Args:
        weights: as many as `shapes`, of these shapes.
        shapes: of all weights.
        dtype: float32 or bfloat16, in which they are stored.
    """
    header, offsets = _layout(shapes, dtype)
    number = os.memfd_create("weights")
    with os.fdopen(number, "wb") as file:
        file.write(header)
        for name, tensor in weights:
            stored = tensor.detach().to("cpu", dtype).contiguous()
            file.seek(len(header) + offsets[name])
            file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{number}"


def _layout(shapes: Shapes, dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and each weight's offset after it."""
    entries, offsets, end = {}, {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        offsets[name] = start
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin at multiples of 8, as the format asks.
    return struct.pack("<Q", len(text)) + text, offsets
