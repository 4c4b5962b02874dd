"""Servers for tests and benchmarks: `python -m tasks.server` in a process of its own, and one inside the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks import conf, retrieval, store
from tasks.data.world import WorldConf, passages
from tasks.retrieval import Retriever
from tasks.server.app import SearchService, make_app
from tasks.server.settings import Settings
from tasks.types import Hit

ROOT = Path(__file__).parents[2]
SECONDS_TO_START = 120.0


def write_world(path: Path) -> None:
    """The corpus of the smoke world: 276 passages."""
    world = conf.fill(WorldConf, conf.section("data", "smoke", ROOT)["world"], "conf/data/smoke.yaml: world")
    store.write_jsonl(path, ({"id": p.id, "title": p.title, "text": p.text} for p in passages(world)))


def ends_with_make(*words: str, seconds: float = SECONDS_TO_START) -> None:
    """Start a server by `make`, end `make` alone with SIGTERM as a service manager does: nothing of it stays behind.

    Raises:
        AssertionError: it was never ready, or something lives on or still listens.
    """
    port = free_port()
    made = Path(sys.prefix) / ".made-from-run.txt"
    of_make = ("--silent", f"--old-file={made}", f"VENV={sys.prefix}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "ARGS"))}
    with subprocess.Popen(
        ["make", *of_make, *words, f"PORT={port}"],
        cwd=ROOT, env={**environment, "SEARCH_SERVER_API_KEY": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as making:  # fmt: skip
        timer = threading.Timer(seconds, os.killpg, (making.pid, signal.SIGKILL))
        timer.start()
        assert making.stdout is not None
        printed = ""
        while "ready: " not in printed:
            line = making.stdout.readline()
            assert line, printed
            printed += line
        timer.cancel()
        family = psutil.Process(making.pid).children(recursive=True)
        assert family

        making.terminate()
        assert making.wait(30) != 0
        printed += making.stdout.read()
    _, alive = psutil.wait_procs(family, 10)
    for one in alive:
        one.kill()
    assert not alive
    assert "Traceback" not in printed
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ServerProcess:
    """A server on the loopback address; `words` go to its command line. It works in any folder: `cwd`."""

    def __init__(
        self,
        index: Path,
        *words: str,
        module: str = "tasks.server",
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ):
        self.log = index.parent / f"server-{time.monotonic_ns()}.log"
        given = {"SEARCH_SERVER_API_KEY": "", "PYTHONPATH": str(ROOT), **(env or {})}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--index", str(index), *words],
                cwd=cwd, stdout=subprocess.PIPE, stderr=output, text=True, env={**os.environ, **given},
            )  # fmt: skip
        self.url = ""

    def wait(self) -> ServerProcess:
        """Until its line says that it is ready."""
        timer = threading.Timer(SECONDS_TO_START, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        timer.cancel()
        assert line.startswith("ready: "), self.log.read_text()
        self.url = next(word for word in line.split() if word.startswith("http://"))
        return self

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def rss(self) -> int:
        """Its resident memory in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Processor seconds that it and its processes have used."""
        server = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (server, *server.children())]
        return sum(one.user + one.system for one in times)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(seconds)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def __enter__(self) -> ServerProcess:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


class NumberRetriever:
    """Answers any query at once with as many hits as asked; remembers its batches, may be slow, blocked or broken."""

    def __init__(self, count: int = 50, seconds: float = 0.0, bad: Callable[[str], bool] = lambda query: False) -> None:
        self.count, self.seconds, self.bad = count, seconds, bad
        self.batches: list[tuple[list[str], int]] = []
        self.free = threading.Event()
        self.free.set()

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        self.free.wait(30)
        self.batches.append((list(queries), top_k))
        time.sleep(self.seconds)
        if any(map(self.bad, queries)):
            raise retrieval.RetrievalError("no answer to that")
        return [self.hits(query, top_k) for query in queries]

    def hits(self, query: str, top_k: int) -> list[Hit]:
        return [
            Hit(f"p{i}", len(query) / (i + 3), query[:9], f"{query[-9:]} {i}") for i in range(min(top_k, self.count))
        ]


@contextlib.asynccontextmanager
async def serving(
    index: Path, settings: Settings, opened: Retriever | None = None, api_key: str | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, SearchService]]:
    """A client of an application that runs in this process, without sockets."""
    ready = asyncio.Event()
    service = SearchService(index, settings, on_change=lambda _: ready.set(), opened=opened)
    service.start()
    await asyncio.wait_for(ready.wait(), SECONDS_TO_START)
    if service.failure is not None:
        raise service.failure
    if isinstance(opened, NumberRetriever):
        opened.batches.clear()
    app: Any = make_app(service, settings, api_key)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60.0) as client:
        try:
            yield client, service
        finally:
            service.stop()
