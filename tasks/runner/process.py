"""The process of a stage: it ends with its parent, leaves in good order on SIGTERM, and measures its memory."""

from __future__ import annotations

import atexit
import gc
import os
import resource
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from tasks.lifetime import end_with_parent

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""Python looks for cycles of garbage after 700 new objects. Libraries make millions that stay: a tenth of a stage's
processor time went into looking at them again and again."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def begin() -> None:
    """End with the parent, turn SIGTERM into SystemExit, and give numeric libraries one thread by default."""
    end_with_parent()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    signal.signal(signal.SIGTERM, _leave)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def end(code: int) -> None:
    """End this process with an exit code, as soon as its exit handlers have run and its output is written.

    Python would go on to free every module and object one by one, which after torch takes a second of processor
    time in each stage. While other threads still work it does so here too: returning leaves the end to Python.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def peak_rss_mb() -> float:
    """Most memory this process, or a child it has waited for, ever held."""
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return max(resource.getrusage(process).ru_maxrss for process in processes) / unit
