"""Runs a command in a child process, passes its output on, and stops it with all its descendants."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks import loopback, writable

Say = Callable[[str], None]

SECONDS_TO_LEAVE = 4.0
LAST_LINES = 15
NOISE = ("Use `dvc push`", "To track the changes", "\tgit add", "To enable auto staging", "\tdvc config",
         "> exec python", "Updating lock file")  # fmt: skip

PROGRESS = re.compile(r"\d+%\|.*\||\b\d+(\.\d+)?[kMG]?it \[\d+:\d\d")
"""What a line of tqdm's progress bars holds; each update of a bar comes as a line of its own."""
KILLED = re.compile(r"exited with (-9|137)$")
"""How DVC's message ends where a stage was killed by signal 9; the stage itself could say nothing."""
FULL = re.compile(r"No space left on device|Disk quota exceeded")
"""What DVC's own words, or its traceback, hold where the disk is full."""
KILLED_TOO = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a DVC that was killed with its stage, as a control group does, so that it could say nothing either."""
OUT_OF_MEMORY = (
    "the system killed it (signal 9), as it does where memory runs out. Close other programs, or lower batch_rows or "
    "max_batch_tokens in conf/scale."
)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        result: `executed`, `cached` (DVC had nothing to do, or took the result from its cache), `failed`,
            `stopped`, or `skipped` (something it needs did not end well).
        message: for `failed`, the stage's own `error:` line or its last lines; for `skipped`, why.
    """

    name: str
    result: Literal["executed", "cached", "failed", "stopped", "skipped"]
    seconds: float = 0.0
    message: str = ""

    @property
    def is_good(self) -> bool:
        """Whether stages that depend on this one may run."""
        return self.result in ("executed", "cached")


class Stopper:
    """Ends all running children with one call; each of them leads a process group, which holds its descendants."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self.signal: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped."""
        return self.signal is not None

    @property
    def is_busy(self) -> bool:
        """Whether a child is running."""
        return bool(self._groups)

    def stop(self, number: int) -> None:
        """End every child, in the background, because a signal's handler must not wait."""
        if not self.is_stopped:
            self.signal = number
            threading.Thread(target=self._end, daemon=True).start()

    @contextlib.contextmanager
    def watching(self, group: int) -> Iterator[None]:
        """Inside the block a stop ends this group, also a stop that came just before it."""
        self._groups.add(group)
        if self.is_stopped:
            _send(group, signal.SIGTERM)
        try:
            yield
        finally:
            self._groups.discard(group)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in list(self._groups):
                _send(group, number)
            until = time.monotonic() + SECONDS_TO_LEAVE
            while self._groups and time.monotonic() < until:
                time.sleep(0.05)


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def stopped_by_signals(stopper: Stopper) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C stop the children of a run; the run then ends by itself, in good order.

    A signal that was ignored stays ignored: Ctrl-C is not meant for what a script runs in its background.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda received, frame: stopper.stop(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute(name: str, words: list[str], root: Path, say: Say, stopper: Stopper, **env: str) -> Outcome:
    """Run `python -m words` in the clone `root` and pass each line of its output to `say` as it comes.

    Args:
        name: of its outcome.
        words: a module and its arguments.
        root: root of the clone.
        say: called with each line, without its line break.
        stopper: can end it.
        env: more variables.
    """
    started = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # DVC's `python` is this one.
    child = subprocess.Popen(
        [sys.executable, "-m", "tasks.lifetime", sys.executable, "-m", *words],
        cwd=root,
        env={**os.environ, **loopback.given_back(), "PATH": path, "PYTHONUNBUFFERED": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # A terminal's Ctrl-C reaches this process alone, which then ends the child.
    )

    last: deque[str] = deque(maxlen=LAST_LINES)
    is_executed = False
    with stopper.watching(child.pid):
        assert child.stdout is not None
        for line in map(str.rstrip, child.stdout):
            is_executed = is_executed or line.startswith("Running stage '")
            if line and not line.startswith(NOISE):
                say(line)
                if not PROGRESS.search(line):  # The last update of a bar is no reason for a failure.
                    last.append(line)
        child.wait()

    seconds = time.monotonic() - started
    if child.returncode == 0:
        return Outcome(name, "executed" if is_executed else "cached", seconds)
    if stopper.is_stopped:
        return Outcome(name, "stopped", seconds)
    return Outcome(name, "failed", seconds, _why(name, child.returncode, last))


def _why(name: str, code: int, last: Iterable[str]) -> str:
    """Why a child failed: its exit code and its last lines tell. Who shows it says which one it was."""
    errors = [line.removeprefix("error: ") for line in last if line.startswith("error:")]
    message = errors[-1] if errors else "\n".join(last) or f"it ended with code {code} without a message"
    message = message.removeprefix(f"{name}: ")
    if code in KILLED_TOO or KILLED.search(message):
        return OUT_OF_MEMORY
    is_full = not errors and FULL.search(message)
    return writable.no_space() if is_full else message
