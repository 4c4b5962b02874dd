"""How many floating-point operations a device could do in a second, were it busy with matrix products alone.

For a GPU that is the peak of its data sheet. For a processor it is measured. Nobody guesses: a GPU that is not in the
table has no limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PEAKS = {
    r"NVIDIA A100(-SXM4-\d+GB|-PCIE-\d+GB| 80GB PCIe)": (312.0, 19.5),
    r"NVIDIA H100 80GB HBM3": (989.0, 67.0),
    r"NVIDIA H100 PCIe": (756.0, 51.0),
    r"NVIDIA H200": (989.0, 67.0),
    r"NVIDIA L40S": (362.0, 91.6),
    r"NVIDIA L4": (121.0, 30.3),
    r"NVIDIA A10": (125.0, 31.2),
}
"""Name of a GPU as torch says it, whole -> TFLOP/s in bfloat16 and in float32, by NVIDIA's data sheets.

Dense: the sheets also print twice as much for sparse matrices. Float32 is that without TF32, which nothing here turns
on. A part of a GPU (MIG) has another name and so no limit.
"""

_SIZE = 1024
_SECONDS = 0.3
_FEWEST = 4


@dataclass(frozen=True)
class Limit:
    """What one device could do.

    Attributes:
        device: its name, and the type of the numbers.
        flop_per_s: floating-point operations a second; None where unknown.
        source: where the number comes from, or why there is none.
    """

    device: str
    flop_per_s: float | None
    source: str


def of(device: torch.device, dtype: torch.dtype) -> Limit:
    """The limit of this device for matrices of this type; on a processor it takes about half a second.

    Args:
        device: a GPU, or the processor with the threads that torch has now.
        dtype: float32 or bfloat16.
    """
    import torch

    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return of_gpu(torch.cuda.get_device_name(device), kind)
    threads = torch.get_num_threads()
    name = f"processor, {threads} {'thread' if threads == 1 else 'threads'}, {kind}"
    return Limit(name, _measured(dtype), f"fastest product of two matrices of {_SIZE} x {_SIZE} after training")


def of_gpu(name: str, dtype: str) -> Limit:
    """The limit of a GPU with this name.

    >>> of_gpu("NVIDIA H100 80GB HBM3", "bfloat16").flop_per_s
    989000000000000.0
    >>> of_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16").flop_per_s is None
    True
    """
    for pattern, (bfloat16, float32) in PEAKS.items():
        if re.fullmatch(pattern, name):
            peak = {"bfloat16": bfloat16, "float32": float32}[dtype]
            return Limit(f"{name}, {dtype}", peak * 1e12, "dense peak of NVIDIA's data sheet")
    return Limit(f"{name}, {dtype}", None, f"{name} is not in the table of tasks/limits.py")


def together(limits: Sequence[Limit]) -> dict[str, str | float | None]:
    """The limit of several devices that work together, as one row; unknown if that of one of them is."""
    names = list(dict.fromkeys(limit.device for limit in limits))
    counts = [sum(limit.device == name for limit in limits) for name in names]
    device = "; ".join(f"{count} x {name}" if count > 1 else name for count, name in zip(counts, names, strict=True))
    known = [limit.flop_per_s for limit in limits if limit.flop_per_s is not None]
    total = sum(known) if limits and len(known) == len(limits) else None
    source = "; ".join(dict.fromkeys(limit.source for limit in limits if total is not None or not limit.flop_per_s))
    return {"device": device, "flop_per_s": total, "source": source}


def _measured(dtype: torch.dtype) -> float:
    """Operations a second of the fastest of some matrix products; draws no random number."""
    import torch

    one, other = (torch.full((_SIZE, _SIZE), value, dtype=dtype) for value in (0.5, 0.25))
    taken: list[float] = []
    while len(taken) < _FEWEST or sum(taken) < _SECONDS:  # The first one prepares.
        started = time.perf_counter()
        torch.mm(one, other)
        taken.append(time.perf_counter() - started)
    return 2 * _SIZE**3 / min(taken)
