"""Locks of a clone: the kernel frees them when their process ends, however it ends."""

import fcntl
import os
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

LOCKS = Path(".scratch/locks")
SECONDS_FOR_TURN = 30


def wait_for_turn(root: Path, name: str) -> AcquireReturnProxy:
    """Lock stage `name` until the end of a `with`. A stage that was just killed may need a moment to stop writing.

    Raises:
        ValueError: another process still works on the stage after half a minute.
    """
    path, holder = (root / LOCKS / f"{name}.{suffix}" for suffix in ("lock", "pid"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        turn = FileLock(path).acquire(timeout=SECONDS_FOR_TURN)
    except Timeout:
        pid = holder.read_text() if holder.exists() else "unknown"
        raise ValueError(
            f"{name}: process {pid} is running this stage in this clone. Wait for it or stop it."
        ) from None
    holder.write_text(str(os.getpid()))
    return turn


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
