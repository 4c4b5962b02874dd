"""How much memory processes have held.

It reads what Linux tells about processes (`/proc`). Elsewhere only this process is known.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Footprint:
    """The most memory that one process has held so far.

    Attributes:
        rss_mb: resident memory in MiB; pages that it shares with other processes count.
        gpu_mb: GPU memory in MiB that torch took in this process, all of its GPUs together.
    """

    rss_mb: float
    gpu_mb: float = 0.0


def own() -> Footprint:
    """Of this process."""
    rss_mb = _peak_mb(os.getpid())
    if rss_mb is None:
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Footprint(rss_mb, _gpu_mb())


def below(without: Collection[int] = ()) -> list[Footprint]:
    """Of the processes that this one has started and that are still there, and of those that these have started.

    What their GPUs hold is not known.

    Args:
        without: ids of processes that are left out, with what they have started.
    """
    found = [_peak_mb(process) for process in _started(os.getpid(), without)]
    return [Footprint(rss_mb) for rss_mb in found if rss_mb is not None]


def with_below() -> list[Footprint]:
    """Of this process and of those below it."""
    return [own(), *below()]


def summed(stage: Footprint, workers: Sequence[Footprint]) -> dict[str, float]:
    """The memory of a stage's processes in MiB: its own, the largest of a worker, and the sum of all.

    Keys of workers and GPUs are there where there are any.
    """
    everyone = [stage, *workers]
    found = {"stage_mb": stage.rss_mb}
    if workers:
        found["largest_worker_mb"] = max(worker.rss_mb for worker in workers)
        found["sum_mb"] = sum(process.rss_mb for process in everyone)
    if any(process.gpu_mb for process in everyone):
        found["largest_gpu_mb"] = max(process.gpu_mb for process in everyone)
        found["sum_gpu_mb"] = sum(process.gpu_mb for process in everyone)
    return {name: round(size, 1) for name, size in found.items()}


def _peak_mb(process: int) -> float | None:
    """Peak of the resident memory; None of a process that has ended.

    Not `ru_maxrss`, which a process takes over from the one that has started it.
    """
    with suppress(OSError):
        for line in (_PROC / str(process) / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return None


def _started(process: int, without: Collection[int]) -> Iterator[int]:
    """Every process below this one; each thread has a list of those that it started."""
    children: list[int] = []
    for path in (_PROC / str(process) / "task").glob("*/children"):
        with suppress(OSError):
            children += map(int, path.read_text(encoding="utf-8").split())
    for child in children:
        if child not in without:
            yield child
            yield from _started(child, without)


def _gpu_mb() -> float:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    taken = sum(torch.cuda.max_memory_reserved(number) for number in range(torch.cuda.device_count()))
    return float(taken) / 2**20
