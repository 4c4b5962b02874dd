"""A lock, so that one process at a time works on a stage of a clone."""

from __future__ import annotations

import fcntl
import os
import time
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
    for _ in range(SECONDS_FOR_TURN * 10):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return
        except BlockingIOError:
            time.sleep(0.1)
    holder = os.read(handle, 20).decode() or "unknown"
    raise ValueError(f"{name}: process {holder} is running this stage in this clone. Wait for it or stop it.")
