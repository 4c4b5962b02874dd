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

SECONDS_TO_LEAVE = 5.0
LAST_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        result: `executed`, `cached` (DVC had nothing to do, or took the result from its cache), `failed`,
            or `skipped` (something it needs failed, or the run was stopped).
        message: for `failed`, the stage's own `error:` line or its last lines; for `skipped`, why.
    """

    name: str
    result: Literal["executed", "cached", "failed", "skipped"]
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
        self._guard = threading.Lock()
        self.is_stopped = False

    def add(self, pid: int) -> None:
        """Remember a child."""
        with self._guard:
            self._children.add(pid)

    def remove(self, pid: int) -> None:
        """Forget a child that has ended."""
        with self._guard:
            self._children.discard(pid)

    def stop(self) -> None:
        """End every child and its descendants: SIGTERM, and after some seconds SIGKILL."""
        self.is_stopped = True
        family: list[psutil.Process] = []
        # Without the lock, because a signal handler that waits for it could wait for ever.
        for pid in list(self._children):
            try:
                child = psutil.Process(pid)
                family += [*child.children(recursive=True), child]
            except psutil.Error:
                continue
        for signal_all in (psutil.Process.terminate, psutil.Process.kill):
            for process in family:
                try:
                    signal_all(process)
                except psutil.Error:
                    continue
            family = _still_alive(family)


def _still_alive(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those of these processes that live on after some seconds.

    `psutil.wait_procs` would collect the exit status of our child, and `Popen.wait` would then take 0 for it: a
    stopped stage would count as executed.
    """
    until = time.monotonic() + SECONDS_TO_LEAVE
    while (alive := [one for one in family if _is_alive(one)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def execute(name: str, root: Path, key: str, force: bool, say: Say, stopper: Stopper) -> Outcome:
    """Run one DVC stage in a child process and pass each line of its output to `say` as it comes.

    Args:
        name: such as `train@search_r1_grpo-0`.
        root: root of the clone.
        key: name of the pipeline run, under which tracking gathers its stages.
        force: run it even if nothing changed.
        say: called with each line, without its line break.
        stopper: can end the child.
    """
    if stopper.is_stopped:
        return Outcome(name, "skipped", message="the run was stopped")

    started = time.monotonic()
    words = ["--wait-for-lock", "repro", "--single-item", *(["--force"] if force else []), name]
    bin_folder, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    env = {
        **os.environ,
        "BREADCRUMB_RUN": key,
        "BREADCRUMB_OWNER": str(os.getpid()),
        "PATH": f"{bin_folder}{os.pathsep}{path}",  # So that `python` in dvc.yaml is the interpreter of this process.
        "PYTHONPATH": _python_path(),
        "PYTHONUNBUFFERED": "1",
    }

    child = subprocess.Popen(
        [sys.executable, "-m", "flows.dvc_command", *words],
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    stopper.add(child.pid)

    last: deque[str] = deque(maxlen=LAST_LINES)
    executed = False
    try:
        assert child.stdout is not None
        for line in child.stdout:
            line = line.rstrip().rpartition("\r")[2]
            executed = executed or line.startswith("Running stage '")
            if line and not line.startswith(NOISE):
                last.append(line)
                say(line)
        child.wait()
    finally:
        stopper.remove(child.pid)

    seconds = time.monotonic() - started
    if stopper.is_stopped and child.returncode:
        return Outcome(name, "skipped", seconds, "the run was stopped")
    if child.returncode:
        return Outcome(name, "failed", seconds, _reason(list(last), child.returncode))
    return Outcome(name, "executed" if executed else "cached", seconds)


def start_tracking(root: Path, key: str) -> None:
    """Start the sender of tracking records early, so that it is ready when the first stage ends.

    It ends soon after this process. A failure here does no harm, because every stage can start it as well.
    """
    if os.environ.get("BREADCRUMB_TRACKING", "on") == "off":
        return
    log = root / ".scratch/logs/tracking.txt"
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "tasks.runner.tracking", "follow", key, str(os.getpid())],
                cwd=root,
                env={**os.environ, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def _python_path() -> str:
    code = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")]))


NOISE = (
    "Use `dvc push`",
    "To track the changes",
    "\tgit add",
    "To enable auto staging",
    "\tdvc config",
    "> exec python",
)


def _reason(last: list[str], code: int) -> str:
    errors = [line for line in last if line.startswith("error:")]
    if errors:
        return errors[-1].removeprefix("error: ")
    return "\n".join(last) or f"it ended with code {code} without a message"
