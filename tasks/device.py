"""What a process takes of the machine: GPUs, one process at a time, and threads and memory of the CPU.

A second process that wants a GPU waits, instead of both running out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

_POLL_S = 1.0
_held: dict[str, FileLock] = {}  # Kept for ever: the lock is the process's, and the kernel frees it with the process.


def gpus() -> list[str]:
    """Ids of the GPUs that this process sees, those of the hardware: `CUDA_VISIBLE_DEVICES` renumbers, not renames."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def hold(ids: Sequence[str], say: Callable[[str], None] = print) -> None:
    """Hold these devices until this process ends; while another process has one, say so and wait.

    Args:
        ids: of devices. In one order for all processes, so that no two wait for each other.
        say: hears whom this process waits for.

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
            say(f"GPU {name} is in use by {_told(holder)}: waiting until that process ends")
            lock.acquire(poll_interval=_POLL_S)
        holder.write_text(f"process {os.getpid()} in {Path.cwd()}", encoding="utf-8")
        _held[name] = lock


def _told(holder: Path) -> str:
    """Who wrote that it has the device; a process that took it this very moment may not have done so yet."""
    with contextlib.suppress(OSError):
        return holder.read_text(encoding="utf-8") or "another process"
    return "another process"


def _folder() -> Path:
    """Of this machine and user, whatever clone a process works in."""
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
    torch.set_num_threads(count)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: a step's activations would be mapped and zeroed anew each time."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # Another C library: nothing to gain.
