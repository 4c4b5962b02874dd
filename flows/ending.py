"""How a run ends: what a signal does to it, what it prints at last, and its exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from flows import STOPPED
from flows.pipeline import Run, summary


@contextlib.contextmanager
def stopped_by_signals(run: Run) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the stages first and then do what they did before: Prefect's own handler, if any.

    A signal that was ignored stays ignored: Ctrl-C is not meant for what a script runs in its background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: Any) -> None:
        run.stopper.stop()
        run.has_ended.set()  # The process then ends even if Prefect catches the exception raised here.
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)

    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def close(run: Run) -> int:
    """Say how a run ended; 0 when every stage is up to date."""
    if not run.has_failed and (run.problems or len(run.outcomes) < len(run.graph.needs)):
        # Prefect catches a KeyboardInterrupt, so the missing outcomes show it.
        print(STOPPED, file=sys.stderr, flush=True)
        return 130
    if run.problems:
        for problem in run.problems:
            print(f"error: {problem.name}: {problem.message}", file=sys.stderr, flush=True)
        print("Finished stages are kept. Mend the cause and run again; the run goes on from there.", file=sys.stderr)
        return 1
    print(summary(run), flush=True)
    return 0
