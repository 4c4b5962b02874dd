"""How a process uses the machine: it holds its GPUs alone, and sets threads and memory of the CPU.

A process of another run that wants a held GPU waits, instead of both running out of memory. Processes of one run share
their GPUs: a stage, its workers, and generators that sleep while the policy learns.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 1.0
_WRITTEN_S = 0.2
_held: dict[str, FileLock] = {}  # Never released: the kernel frees the locks when the process ends.
_run = secrets.token_hex(8)


def run() -> str:
    """Names this process and its workers."""
    return _run


def join(run: str) -> None:
    """This process is a worker of that run."""
    global _run
    _run = run


def take_turn(number: int, count: int = 1) -> None:
    """Let this process see only `count` of the host's GPUs, those of its turn; before it has used any.

    Args:
        number: of this process among those of its kind on this host.
        count: GPUs that it takes.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if names:
        turn = [names[(number * count + index) % len(names)] for index in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(turn))


def gpus() -> list[str]:
    """Hardware ids of the GPUs that this process sees; `CUDA_VISIBLE_DEVICES` changes their numbers, not these."""
    import torch  # Here, because a process that only waits for a device needs no torch.

    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def hold(ids: Sequence[str], report: Callable[[str], None] = print) -> None:
    """Hold these devices until this process ends; while another run holds one, report that and wait.

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
        for attempt in itertools.count():
            if _acquired(lock):
                holder.write_text(f"process {os.getpid()} in {Path.cwd()}\n{_run}", encoding="utf-8")
                _held[name] = lock
                break
            process, run = _holder(holder)
            if run == _run:
                break

            # At the first attempt another worker of this run may have the lock, and not have written that yet.
            if attempt == 1:
                report(f"GPU {name} is in use by {process}: waiting until that process ends")
            time.sleep(_POLL_S if attempt else _WRITTEN_S)


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _holder(holder: Path) -> tuple[str, str]:
    """The process that holds the device, if it has already written its name, and its run."""
    text = ""
    with contextlib.suppress(OSError):
        text = holder.read_text(encoding="utf-8")
    process, _, run = text.partition("\n")
    return process or "another process", run


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
