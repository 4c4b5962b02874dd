"""The pipeline as a Prefect flow. Prefect knows when, DVC knows what depends on what, the core knows neither.

Prefect reads some settings at import, so they are set here: its files stay in the clone and nothing is sent anywhere.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks import loopback, program, writable

STOPPED = "stopped. Run again to go on where it stopped."

for _name, _value in {
    "PREFECT_HOME": str(Path(".scratch/prefect").resolve()),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_CLIENT_MAX_RETRIES": "2",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # A stage that was stopped would be an ERROR.
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "true",
}.items():
    os.environ.setdefault(_name, _value)

if "PREFECT_SERVER_API_AUTH_STRING" in os.environ:  # What our server asks for, our clients say.
    os.environ.setdefault("PREFECT_API_AUTH_STRING", os.environ["PREFECT_SERVER_API_AUTH_STRING"])

for _name in loopback.set_aside():
    if not loopback.is_here(os.environ.get("PREFECT_API_URL") or "localhost"):
        print(f"warning: Prefect's client cannot use the proxy in {_name}, and goes without it.", file=sys.stderr)

if Path("dvc.yaml").exists():  # Prefect makes its home, but not what lies above it.
    with contextlib.suppress(OSError):  # `command` says more of it.
        Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def command(main: Callable[[], int], stopped: str = "") -> int:
    """The exit status of a program that works in a clone, which is checked before.

    A ValueError, a full disk and a place that may not be written are its user's to mend; Ctrl-C and SIGTERM are an
    ordinary stop, and so is a reader of its output that goes.

    Args:
        main: what it does.
        stopped: is said after a stop, which is then no success; empty for a server, which only a stop ends.
    """
    signal.signal(signal.SIGTERM, _stop)
    program.open_standard_files()
    try:
        code = _told(main)
    except KeyboardInterrupt as stop:
        code = 128 + (stop.args[0] if stop.args else signal.SIGINT) if stopped else 0
        if stopped:
            print(stopped, file=sys.stderr, flush=True)
    except BrokenPipeError:
        if not program.is_unread():
            raise
        code = program.PIPE_CLOSED
    return int(program.flushed(code) or 0)


def _told(main: Callable[[], int]) -> int:
    """The exit status of `main`; an error that its user can mend is one line."""
    try:
        from tasks.runner.git import check_repository  # Loads libraries, during which Ctrl-C is an ordinary stop.

        writable.check_clone(Path.cwd())
        check_repository(Path.cwd())
        return main()
    except ValueError as error:
        line = str(error)
    except OSError as error:
        if (told := writable.explained(error)) is None:
            raise
        line = told
    print(f"error: {line}", file=sys.stderr, flush=True)
    return 1


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)
