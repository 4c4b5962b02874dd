"""The process of a stage: its variables, how it ends, what it says of a failure.

Importing this module switches telemetry and network look-ups of libraries off, because most libraries read these
variables only once, at import. A variable that the user has set is not changed.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path

from tasks.lifetime import end_with_parent
from tasks.program import flushed
from tasks.store import OutageError
from tasks.writable import explained

LOGS = Path(".scratch/logs")
QUIET = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "true",
    "TOKENIZERS_PARALLELISM": "false",
}
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# A thread of OpenMP that waits for another spins for milliseconds. Where something else runs, too, it takes the
# processor that the other thread needs: two threads beside one busy loop took 11.4 s instead of 7.4 s.
THREADS["GOMP_SPINCOUNT"] = "1000"

os.environ |= QUIET | os.environ


def begin() -> None:
    """End with the parent, turn SIGTERM into SystemExit, and give numeric libraries one thread by default."""
    end_with_parent()
    if "DVC_STAGE" in os.environ and os.getppid() == 1 and b"dvc" not in Path("/proc/1/cmdline").read_bytes():
        sys.exit(143)  # DVC was killed while this process loaded its libraries.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ |= THREADS | os.environ
    # Python looks for cycles of garbage after 700 new objects. Libraries make millions that stay: a tenth of a stage's
    # processor time went into looking at them again and again.
    gc.set_threshold(10_000)


def end(code: int) -> None:
    """End this process with an exit code, as soon as its exit handlers have run and its output is written.

    Python would go on to free every module and object one by one, which after torch takes a second of processor
    time in each stage. While other threads still work it does so here too: returning leaves the end to Python.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        return
    atexit._run_exitfuncs()
    os._exit(int(flushed(code) or 0))


def peak_rss_mb() -> float:
    """Most memory this process, or a child it has waited for, ever held."""
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(process).ru_maxrss for process in processes) / 1024


def report(root: Path, name: str, error: Exception) -> None:
    """Print one `error:` line about the failure of stage `name`, and keep its traceback in `.scratch/logs/`.

    The traceback of an error that is ours, neither the user's nor an outage, is printed as well.
    """
    if (told := explained(error)) is not None and not isinstance(error, (ValueError, OutageError)):
        message = told
    elif isinstance(error, (ValueError, OutageError)):
        message = " ".join(str(error).split("\n"))
    elif isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("tasks"):
        message = f"{name}: Python finds no module {error.name!r} in {sys.prefix}: make setup installs what is missing."
    else:
        traceback.print_exception(error)
        message = f"{name}: unexpected {type(error).__name__}: {error}"
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)

    try:
        (root / LOGS).mkdir(parents=True, exist_ok=True)
        (root / LOGS / f"{name}.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        print(f"(traceback in {LOGS / name}.txt)", file=sys.stderr, flush=True)
    except OSError:
        pass  # The message matters more than its copy.
