"""Real Elasticsearch servers for tests: nodes of the kit beside the clone, or the cluster `ELASTICSEARCH_URL` names.

A test that kills or counts needs nodes of its own, so it is skipped where only a foreign cluster is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.retrieval.elastic_server import URL

KIT = Path(__file__).parents[2].parent / "shared" / "elasticsearch" / "elasticsearch-local"
# A node that lives for seconds starts in half the time when its code is compiled lightly.
JAVA = {"ES_HEAP": "256m", "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
SECONDS_TO_START = 90
WHY_NOT = (
    f"no Elasticsearch: {KIT.parent} is missing"
    if not KIT.is_file()
    else "no Elasticsearch: there is no java"
    if shutil.which("java") is None
    else ""
)
# A killed test run takes its servers along.
_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def call(url: str, method: str = "GET", body: Any = None, timeout: float = 30) -> Any:
    """A plain HTTP request without any client: parsed JSON, of an error as well."""
    request = urllib.request.Request(url, method=method, headers={"content-type": "application/json"})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(request, data, timeout) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return json.loads(error.read() or b"null")


class Node:
    """One node of the kit; its data outlive it. Start it from the thread that lives as long as it should."""

    def __init__(self, folder: Path, *settings: str, transport: int = 0) -> None:
        self.folder, self.settings = folder, settings
        self.port, self.transport = free_port(), transport or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and do not wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [
            str(KIT),
            str(self.folder / "data"),
            str(self.port),
            f"transport.port={self.transport}",
            "cluster.routing.allocation.disk.threshold_enabled=false",  # Or a nearly full disk gets no replicas.
            *self.settings,
        ]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **JAVA})

    def wait(self, health: str = "wait_for_status=yellow", seconds: float = SECONDS_TO_START) -> Node:
        """Until the cluster answers with this health and no shard is on its way."""
        until = time.monotonic() + seconds
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "log.txt").read_text("utf-8")[-3000:]
            try:
                found = call(f"{self.url}/_cluster/health?{health}&wait_for_no_initializing_shards=true&timeout=5s")
                if found.get("timed_out") is False:
                    return self
            except OSError:
                pass
            assert time.monotonic() < until, f"no {health} within {seconds} s: {self.url}"
            time.sleep(0.1)

    def ensure(self) -> Node:
        """Start it if it is not running, and wait."""
        if not self.is_running:
            self.start()
        return self.wait()

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Server:
    """What a test may know of a server: its address, and an alias nobody else uses."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.alias = f"test-{uuid.uuid4().hex[:12]}"

    def call(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """See `call`."""
        return call(f"{self.url}/{path}", method, body)

    def wait_for(self, key: str, path: str, method: str = "GET", body: Any = None) -> Any:
        """The first answer that has this key: a cluster that elects a master answers with an error meanwhile."""
        until = time.monotonic() + SECONDS_TO_START
        while key not in (found := self.call(path, method, body)):
            assert time.monotonic() < until, f"{path}: {found}"
            time.sleep(0.1)
        return found

    def indexes(self) -> list[str]:
        """Indexes whose names begin with the alias."""
        return sorted(self.call(f"{self.alias}-*"))

    def holders(self, alias: str = "") -> list[str]:
        """Indexes the alias names."""
        found = self.call(f"_alias/{alias or self.alias}")
        return sorted(name for name, value in found.items() if isinstance(value, dict) and "aliases" in value)

    def rows(self, index: str) -> list[tuple[str, int]]:
        """(id, row) of every document in an index of at most 10,000, in order of rows."""
        self.wait_for("_shards", f"{index}/_refresh", "POST")
        body = {"size": 10_000, "sort": ["row"], "_source": ["id", "row"]}
        found = self.wait_for("hits", f"{index}/_search?allow_partial_search_results=false", "POST", body)
        return [(one["_source"]["id"], one["_source"]["row"]) for one in found["hits"]["hits"]]

    def clean(self) -> None:
        """Delete the test's indexes."""
        for index in self.indexes():
            self.call(index, "DELETE")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that may be killed; it is started again for the next test. Its write queue is short, so that it fills."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    one = Node(tmp_path_factory.mktemp("elasticsearch"), "thread_pool.write.size=1", "thread_pool.write.queue_size=2")
    yield one
    one.kill()


@pytest.fixture
def own_server(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the test's own."""
    server = Server(node.ensure().url)
    monkeypatch.setenv(URL, server.url)
    yield server
    with contextlib.suppress(OSError):  # Nobody else sees the indexes of a dead node.
        server.clean()


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The cluster of `ELASTICSEARCH_URL`, else the test's own."""
    if URL not in os.environ:
        yield request.getfixturevalue("own_server")
        return
    named = Server(os.environ[URL].split(",")[0])
    yield named
    named.clean()


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """A cluster of three, all of which may be master and hold data; a test starts those that the one before killed."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    folder = tmp_path_factory.mktemp("three")
    transports = [free_port() for _ in range(3)]
    seeds = "discovery.seed_hosts=" + ",".join(f"127.0.0.1:{port}" for port in transports)
    masters = "cluster.initial_master_nodes=n0,n1,n2"
    nodes = [
        Node(folder / f"n{i}", f"node.name=n{i}", seeds, masters, "cluster.name=three", transport=transports[i])
        for i in range(3)
    ]
    yield nodes
    for one in nodes:
        one.kill()
