"""Runs one DVC stage in a child process, passes its output on, and stops it with all its descendants.

It knows no stage by name, nothing of what a stage computes, and nothing of Prefect.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Say = Callable[[str], None]

SECONDS_TO_LEAVE = 4.0
LAST_LINES = 15


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
    """The running children, so that one call ends them all."""

    def __init__(self) -> None:
        self._children: set[int] = set()
        self.signal: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped."""
        return self.signal is not None

    def add(self, pid: int) -> None:
        """Remember a child; one that starts after the stop ends at once."""
        self._children.add(pid)
        if self.is_stopped:
            _end([pid])

    def remove(self, pid: int) -> None:
        """Forget a child that has ended."""
        self._children.discard(pid)

    def stop(self, signal: int) -> None:
        """End every child with its descendants, in the background, because a signal's handler must not wait."""
        if not self.is_stopped:
            self.signal = signal
            threading.Thread(target=_end, args=(list(self._children),), daemon=True).start()


def _end(children: list[int]) -> None:
    """SIGTERM to these processes and all below them, and SIGKILL to those that live on after some seconds."""
    family: list[psutil.Process] = []
    for pid in children:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(pid)
            family += [*child.children(recursive=True), child]

    for signal_all in (psutil.Process.terminate, psutil.Process.kill):
        for process in filter(_is_alive, family):
            with contextlib.suppress(psutil.Error):
                signal_all(process)
        # `psutil.wait_procs` would collect the exit status of our child, and `Popen.wait` would take 0 for it.
        until = time.monotonic() + SECONDS_TO_LEAVE
        while any(map(_is_alive, family)) and time.monotonic() < until:
            time.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def repro(name: str, root: Path, key: str, force: bool, say: Say, stopper: Stopper) -> Outcome:
    """Run one DVC stage, such as `train@search_r1_grpo-0`; see `execute`.

    Args:
        key: name of the pipeline run, under which tracking gathers its stages.
        force: run it even if nothing changed.
    """
    words = ["dvc", "--wait-for-lock", "repro", "--single-item", *(["--force"] if force else []), name]
    return execute(name, words, root, say, stopper, BREADCRUMB_RUN=key, BREADCRUMB_OWNER=str(os.getpid()))


def execute(name: str, words: list[str], root: Path, say: Say, stopper: Stopper, **env: str) -> Outcome:
    """Run `python -m words` in a child process and pass each line of its output to `say` as it comes.

    Args:
        name: of its outcome.
        words: a module and its arguments.
        root: root of the clone.
        say: called with each line, without its line break.
        stopper: can end the child.
        env: more variables.
    """
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "tasks.lifetime", sys.executable, "-m", *words],
        cwd=root,
        env=_environment(PYTHONUNBUFFERED="1", **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # A terminal's Ctrl-C reaches this process alone, which then ends the child.
    )
    stopper.add(child.pid)

    last: deque[str] = deque(maxlen=LAST_LINES)
    executed = False
    assert child.stdout is not None
    for line in child.stdout:
        line = line.rstrip().rpartition("\r")[2]
        executed = executed or line.startswith("Running stage '")
        if line and not line.startswith(NOISE):
            last.append(line)
            say(line)
    child.wait()
    stopper.remove(child.pid)

    seconds = time.monotonic() - started
    if child.returncode == 0:
        return Outcome(name, "executed" if executed else "cached", seconds)
    if stopper.is_stopped:
        return Outcome(name, "stopped", seconds)
    return Outcome(name, "failed", seconds, _reason(list(last), child.returncode))


def _environment(**more: str) -> dict[str, str]:
    """The environment of a child: `python` is this interpreter, and this code is found."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    code = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    joined = {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(filter(None, code))}
    return {**os.environ, **joined, **more}


NOISE = (
    "Use `dvc push`",
    "To track the changes",
    "\tgit add",
    "To enable auto staging",
    "\tdvc config",
    "> exec python",
    "Updating lock file",
)


def _reason(last: list[str], code: int) -> str:
    errors = [line for line in last if line.startswith("error:")]
    if errors:
        return errors[-1].removeprefix("error: ")
    return "\n".join(last) or f"it ended with code {code} without a message"
