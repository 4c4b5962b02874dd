"""The pipeline as a Prefect flow. Prefect knows when, DVC knows what depends on what, the core knows neither.

Prefect reads some settings at import, so they are set here: its files stay in the clone and nothing is sent anywhere.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

if Path("dvc.yaml").exists():  # Prefect makes its home, but not what lies above it.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def command(main: Callable[[], int], stopped: str = "") -> int:
    """The exit status of a program: a ValueError is its user's to mend, Ctrl-C and SIGTERM are an ordinary stop.

    Args:
        main: what it does.
        stopped: is said after a stop, which is then no success; empty for a server, which only a stop ends.
    """
    signal.signal(signal.SIGTERM, _stop)
    try:
        return main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as stop:
        if not stopped:
            return 0
        print(stopped, file=sys.stderr, flush=True)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)
