"""What a figure was measured on, and the process that measures it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def described(threads: int, packages: Sequence[str]) -> str:
    """Processor, threads, load average of the last minute and versions, in one line."""
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {version(name) or 'missing'}" for name in packages)
    return f"{processor()}, {threads} of {cores} cores, load average {os.getloadavg()[0]:.2f}; {versions}"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, family and model, as the kernel gives them."""
    found: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name", "a processor without a name")
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"


def version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_alone(module: str, words: Sequence[str], threads: int) -> None:
    """Run a module in a fresh interpreter with a fixed number of threads.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why.
    """
    count = str(threads)
    fixed = {
        "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", module, *words], check=True, cwd=ROOT, env={**os.environ, **fixed})


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
