"""Locks of a clone: the kernel frees them when their process ends, however it ends."""

import fcntl
import os
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

PIPELINE, HOLDER = Path(".scratch/pipeline.lock"), Path(".scratch/pipeline.pid")
LOCKS = Path(".scratch/locks")
SECONDS_FOR_TURN = 30
BUSY = (
    "another {} is at work in this clone, and two would overwrite each other's results. "
    "Wait for it to end, stop it, or work in a second clone."
)


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


def refuse_beside_pipeline(root: Path) -> None:
    """Refuse a stage that was started beside a pipeline run; a stage of that run has its key in its variables.

    Raises:
        ValueError: a run is at work in the clone.
    """
    if "BREADCRUMB_RUN" not in os.environ and is_held(root / PIPELINE):
        raise ValueError(BUSY.format(f"pipeline run (process {pipeline_pid(root)})"))


def pipeline_pid(root: Path) -> str:
    """Process id of the pipeline run at work; `unknown` if it has just begun."""
    holder = root / HOLDER
    return holder.read_text(encoding="utf-8").strip() if holder.is_file() else "unknown"


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
