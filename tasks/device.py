"""How a process uses the machine: it holds its GPUs alone, and sets threads and memory of the CPU.

A second process that wants a held GPU waits, instead of both running out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 1.0
_held: dict[str, FileLock] = {}  # Never released: the kernel frees the locks when the process ends.


def gpus() -> list[str]:
    """Hardware ids of the GPUs that this process sees; `CUDA_VISIBLE_DEVICES` changes their numbers, not these."""
    import torch  # Here, because a process that only waits for a device needs no torch.

    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def hold(ids: Sequence[str], report: Callable[[str], None] = print) -> None:
    """Hold these devices until this process ends; while another process holds one, report that and wait.

    Args:
        ids: of devices; they are taken in sorted order, so that no two processes wait for each other.
        report: called with a line that names the process which is waited for.

    Raises:
        ValueError: the folder of the locks cannot be written.
    """
    for name in sorted(set(ids) - _held.keys()):
        path = _folder() / re.sub(r"[^\w.-]", "_", name)
        lock = FileLock(path.with_suffix(".lock"))
        holder = path.with_suffix(".holder")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"GPU {name} is in use by {_holder(holder)}: waiting until that process ends")
            lock.acquire(poll_interval=_POLL_S)
        holder.write_text(f"process {os.getpid()} in {Path.cwd()}", encoding="utf-8")
        _held[name] = lock


def _holder(holder: Path) -> str:
    """The process that holds the device, if it has already written its name."""
    with contextlib.suppress(OSError):
        return holder.read_text(encoding="utf-8") or "another process"
    return "another process"


def _folder() -> Path:
    """The folder of locks, one per machine and user, so that processes of several clones share it."""
    folder = Path(tempfile.gettempdir()) / f"breadcrumb-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made ({error}). Expected room for locks; set TMPDIR.") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: cannot be written. Expected a folder of this user for locks; set TMPDIR.")
    return folder


def use_threads(count: int) -> None:
    """Fix torch's threads (on a CPU their number is part of the result) and keep freed memory for the next step."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch

    torch.set_num_threads(count)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks; else the kernel maps and zeroes memory for activations at each step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # Another C library has no such setting; training is only slower.
