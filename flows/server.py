"""The Prefect server that records a run: a given one, that of `make ui`, or one that lives as long as the run.

As a program, `python -m flows.server SOCKET`, it is that server, closed to web pages of other origins.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import loopback
from tasks.server.origins import Guarded

UI_ADDRESS = Path(".scratch/ui/prefect")
LOG = Path(".scratch/logs/prefect.txt")
SECONDS_TO_START, SECONDS_TO_LEAVE, SECONDS_TO_SEND = 90.0, 5.0, 2.0
SECONDS_TO_ANSWER = 3.0


def find_server(root: Path) -> str | None:
    """Address of a Prefect server that answers: `PREFECT_API_URL`, else the one that `make ui` started."""
    given, made = os.environ.get("PREFECT_API_URL", ""), root / UI_ADDRESS
    address = given or (made.read_text(encoding="utf-8").strip() if made.is_file() else "")
    if address and _is_well(f"{address.rstrip('/')}/health"):
        return address
    if given:
        print(f"warning: no Prefect server answers at {given}; going on with one of this run.", file=sys.stderr)
    return None


def _is_well(url: str) -> bool:
    """Whether a server says so, in a time for the whole: one that sends a byte a second passes each limit of a read."""
    answered: list[int] = []

    def ask() -> None:
        proxies = [urllib.request.ProxyHandler({})] if loopback.is_here(url) else []
        opener = urllib.request.build_opener(*proxies)
        refused = contextlib.suppress(OSError, ValueError, http.client.HTTPException)
        with refused, opener.open(url, timeout=SECONDS_TO_ANSWER) as answer:
            answered.append(answer.status)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS_TO_ANSWER)
    return answered == [200]


@contextlib.contextmanager
def child(words: list[str], log: Path, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, or with this process; its output goes into `log`, unless `how` says else."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        how = {"stdout": output, "stderr": output, **how}
        words = [sys.executable, "-m", "tasks.lifetime", sys.executable, "-m", *words]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **how)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_LEAVE)
            process.kill()
            process.wait()


@contextlib.contextmanager
def started(root: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Prefect server on the loopback address while the block runs, and its process; its files stay in the clone.

    Args:
        root: root of the clone.
        port: 0 takes a free one.

    Raises:
        ValueError: it does not start.
    """
    with socket.create_server(("127.0.0.1", port)) as listening:
        number = listening.fileno()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        env = {**os.environ, "PREFECT_API_URL": address}
        with child(["flows.server", str(number)], root / LOG, cwd=root, env=env, pass_fds=[number]) as server:
            wait_for(server, "Prefect", f"{address}/health", LOG)
            try:
                yield address, server
            finally:
                _send_all()


def _send_all() -> None:
    """Give the server what this process has for it, for some seconds: Prefect asks a server that has ended again."""
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        for queue in (EventsWorker, APILogWorker):
            queue.drain_all(timeout=SECONDS_TO_SEND)


def wait_for(server: subprocess.Popen[bytes], name: str, url: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        ValueError: it ends, or does not answer in time.
    """
    until = time.monotonic() + SECONDS_TO_START
    while not _is_well(url):
        if server.poll() is not None:
            raise ValueError(f"{name} ended by itself (exit status {server.returncode}); see {log}")
        if time.monotonic() > until:
            raise ValueError(f"{name} gave no answer at {url} within {SECONDS_TO_START:.0f} s; see {log}")
        time.sleep(0.1)


def _wait_for_writers() -> None:
    """Let every transaction that may write wait for its turn when it begins.

    Prefect begins most of them as readers. SQLite refuses such a one at its first write if another has written in
    between, whatever time it may wait, and Prefect answers 503, upon which its pages give up.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_as_writer(self: Any, session: Any, with_for_update: bool = True) -> Any:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_as_writer  # type: ignore[method-assign]


def guarded() -> Any:
    """Prefect's pages and interface for this machine alone: a page of another origin can neither read nor start."""
    from prefect.server.api.server import create_app

    _wait_for_writers()
    return Guarded(create_app(final=True))


if __name__ == "__main__":  # Serves on the socket that the parent has opened.
    import uvicorn

    # h11 bounds the headers that a client may send; httptools, the default, reads them without end.
    uvicorn.run("flows.server:guarded", factory=True, fd=int(sys.argv[1]), log_level="warning", http="h11")
