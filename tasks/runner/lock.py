"""Locks of a clone: the kernel frees them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCKS = Path(".scratch/locks")
SECONDS_FOR_TURN = 30


def wait_for_turn(root: Path, name: str) -> None:
    """Hold the stage's lock until this process ends. A stage that was just killed may need a moment to stop writing.

    Raises:
        ValueError: another process still works on the stage after half a minute.
    """
    path = root / LOCKS / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Never closed, so that the kernel frees the lock when the process ends.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _taken(handle, SECONDS_FOR_TURN):
        holder = os.read(handle, 20).decode() or "unknown"
        raise ValueError(f"{name}: process {holder} is running this stage in this clone. Wait for it or stop it.")
    os.truncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())


@contextlib.contextmanager
def held(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold the lock of a file inside the block; yields False if another process holds it for longer than `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield _taken(file.fileno(), wait_s)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    try:
        with path.open() as file:
            return not _taken(file.fileno(), 0, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _taken(handle: int, wait_s: float, kind: int = fcntl.LOCK_EX) -> bool:
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
