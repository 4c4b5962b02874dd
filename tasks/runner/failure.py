"""Tells the user why a stage failed: one line, and the traceback in a file."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path

from tasks.store import OutageError

LOGS = Path(".scratch/logs")


def report(root: Path, name: str, error: Exception) -> None:
    """Print one `error:` line about the failure of stage `name`, and keep its traceback in `.scratch/logs/`.

    The traceback of an error that is ours, neither the user's nor an outage, is printed as well.
    """
    log = root / LOGS / f"{name}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        pass  # The message below matters more than its copy.
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        message = f"no space left on the disk{where}. Free some and run again; finished work is kept."
    elif isinstance(error, (ValueError, OutageError)):
        message = " ".join(str(error).split("\n"))
    else:
        traceback.print_exception(error)
        message = f"{name}: unexpected {type(error).__name__}: {error}"
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    print(f"(traceback in {LOGS / log.name})", file=sys.stderr, flush=True)
