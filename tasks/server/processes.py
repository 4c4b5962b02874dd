"""Several processes behind one port: each is a whole search server, and opens the memory map of the same index.

Every process listens on a socket of its own on the port (SO_REUSEPORT), so that Linux spreads connections evenly and
none waits for a process that is gone. A process that ends is started again, and takes connections when its index is
open. uvicorn's own supervisor (`workers`) does less: its processes outlive it when it is killed, take connections
before the index is open, and are ended where they do not answer a ping in time, which a long search may cause.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from prometheus_client.multiprocess import mark_process_dead

from tasks.server.listening import listening
from tasks.server.metrics import FOLDER
from tasks.server.settings import Settings

MOST = 256
_LONGEST_PAUSE_S = 60.0
_SPARE_S = 5.0


def number(text: str) -> int:
    """A number of processes on a command line; an `argparse` type.

    >>> number("4")
    4
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, expected 1 to {MOST}")
    return int(text)


def serve(words: list[str], count: int, settings: Settings) -> int:
    """Serve in `count` processes until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        words: of the command line `python -m tasks.server`.
        count: processes.
        settings: that these words name.

    Raises:
        ValueError: the port is taken or the address is not one of this machine.
    """
    # A shared socket alone would not notice that somebody else listens there.
    with listening(settings) as alone:
        settings = replace(settings, port=alone.getsockname()[1])
    # Keeps the port while no process listens; without `listen` it gets no connection.
    with listening(settings, is_shared=True), tempfile.TemporaryDirectory(prefix="search-server-") as folder:
        shared = ["--port", str(settings.port), "--worker-of", str(count)]
        return _Processes([*words, *shared], count, folder, 2 * settings.stop_timeout_s + _SPARE_S).run()


def worked(serve: Callable[[], int]) -> int:
    """What `serve` returns in one of the processes, which removes their folder if the supervisor is gone.

    A supervisor that is killed removes nothing; its processes end with it.
    """
    supervisor = os.getppid()
    try:
        return serve()
    finally:
        if os.getppid() != supervisor and (folder := os.environ.get(FOLDER)):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Worker:
    """One process; `ready` is the line it printed when it took connections."""

    number: int
    process: subprocess.Popen[str]
    ready: str = ""


class _Processes:
    """Starts, watches and ends them.

    Args:
        words: of the command line of each.
        count: of them.
        folder: for their metrics.
        stop_s: how long they may take to end.
    """

    def __init__(self, words: list[str], count: int, folder: str, stop_s: float) -> None:
        self._words, self._count, self._folder, self._stop_s = words, count, folder, stop_s
        self._workers: dict[int, _Worker] = {}
        self._events: queue.SimpleQueue[tuple[_Worker, str] | None] = queue.SimpleQueue()
        self._ready = ""
        self._is_told = False
        self._failures = [0] * count
        self._due: dict[int, float] = {}

    def run(self) -> int:
        """Serve until a signal comes; returns the exit status."""
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda *_: self._events.put(None))
        # The first one opens the index alone: what is wrong with it is told once.
        self._due[0] = time.monotonic()
        status = 1
        try:
            status = self._watch()
        finally:
            killed = self._end()
        return status or int(killed)

    def _watch(self) -> int:
        """Until a signal comes (0) or they cannot serve (1)."""
        while True:
            for due in [i for i, moment in self._due.items() if moment <= time.monotonic()]:
                del self._due[due]
                self._start(due)
            wait_s = max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None
            try:
                event = self._events.get(timeout=wait_s)
            except queue.Empty:
                continue
            if event is None:
                return 0
            if not (self._heard(*event) if event[1] else self._ended(event[0])):
                return 1

    def _start(self, number: int) -> None:
        # In the main thread: Linux ends a process with the thread that started it (`tasks.lifetime`).
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.server", *self._words],
            stdout=subprocess.PIPE, text=True, env={**os.environ, FOLDER: self._folder},
        )  # fmt: skip
        worker = self._workers[number] = _Worker(number, process)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._events.put((worker, line))
        self._events.put((worker, ""))

    def _heard(self, worker: _Worker, line: str) -> bool:
        """Take the line of a process that is ready; False where it does not serve what the others do."""
        worker.ready = line
        self._failures[worker.number] = 0
        self._ready = self._ready or line
        if line != self._ready:
            told = f"process {worker.process.pid} opened another index ({line.strip()}) than the first"
            print(f"error: {told} ({self._ready.strip()}). Start the server again.", file=sys.stderr, flush=True)
            return False

        for other in set(range(self._count)) - set(self._workers) - set(self._due):
            self._due[other] = time.monotonic()
        is_whole = len(self._workers) == self._count and all(one.ready for one in self._workers.values())
        if is_whole and not self._is_told:
            self._is_told = True
            print(f"ready: {self._count} processes, {line.removeprefix('ready: ').strip()}", flush=True)
        return True

    def _ended(self, worker: _Worker) -> bool:
        """Let a process be started again; False where the first one of all could not serve."""
        status = worker.process.wait()
        mark_process_dead(worker.process.pid, self._folder)  # type: ignore[no-untyped-call]
        if not self._ready:
            if status != 1:  # With 1 it has told why.
                told = f"the first process ended with status {status} before it could answer"
                print(f"error: {told}. It may lack memory.", file=sys.stderr, flush=True)
            return False
        failures = self._failures[worker.number]
        pause = 0.0 if worker.ready else min(_LONGEST_PAUSE_S, 2.0**failures)
        self._failures[worker.number] = failures + (not worker.ready)
        self._due[worker.number] = time.monotonic() + pause
        again = f"in {pause:g} s" if pause else "now"
        told = f"process {worker.process.pid} ended with status {status}; it is started again {again}"
        print(f"warning: {told}.", file=sys.stderr, flush=True)
        return True

    def _end(self) -> bool:
        """End all processes and wait for them; whether one had to be killed."""
        running = [one.process for one in self._workers.values() if one.process.poll() is None]
        for process in running:
            process.terminate()
        until, killed = time.monotonic() + self._stop_s, False
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                killed = True
                process.kill()
                process.wait()
        return killed
