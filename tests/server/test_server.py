"""A real server on a real socket: loads, slow and broken clients, limits, signals and restarts."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks import retrieval
from tasks.retrieval import RetrievalError, remote
from tasks.retrieval.bm25 import Settings as Bm25
from tasks.store import DataError
from tests.server.attacks import reads_all_that_was_sent
from tests.server.running import ROOT, ServerProcess, ends_with_make, free_port

pytestmark = [pytest.mark.slow, pytest.mark.servers]


def search_r1_client(url: str, queries: list[str], topk: int) -> list[str]:
    """What Search-R1's `_batch_search` and `_passages2string` make of the answers, line by line."""
    answer = httpx.post(url, json={"queries": queries, "topk": topk, "return_scores": True}).json()
    texts = []
    for hits in answer["result"]:
        text = ""
        for number, hit in enumerate(hits, 1):
            first, *rest = hit["document"]["contents"].split("\n")
            text += f"Doc {number}(Title: {first}) " + "\n".join(rest) + "\n"
        texts.append(text)
    return texts


def _connect(server: ServerProcess) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    one.settimeout(10)
    return one


def _read(one: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while block := one.recv(65536):
            received += block
    return received


def test_search_r1s_client_reads_our_answers(server, local):
    queries = ["film directed city", "", "mayor"]
    expected = [
        "".join(f'Doc {i}(Title: "{hit.title}") {hit.text}\n' for i, hit in enumerate(hits, 1))
        for hits in local.search(queries, 3)
    ]
    assert search_r1_client(f"{server.url}/retrieve", queries, 3) == expected


def test_five_hundred_clients_at_once(server, local):
    """Each on a connection of its own; every one gets the hits of its own queries."""
    queries = [[f"film city {i % 97} {'mayor' * (i % 3)}", f"person {i}"] for i in range(500)]

    clients = [_connect(server) for _ in queries]
    for i, (client, two) in enumerate(zip(clients, queries, strict=True)):
        body = json.dumps({"queries": two, "topk": 1 + i % 5, "return_scores": True}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
    for i, client in enumerate(clients):
        head, _, body = _read(client).partition(b"\r\n\r\n")
        client.close()
        assert head.startswith(b"HTTP/1.1 200 OK"), head
        found = [[(h["document"]["id"], h["score"]) for h in hits] for hits in json.loads(body)["result"]]
        expected = local.search(queries[i], 1 + i % 5)
        assert found == [[(hit.passage_id, hit.score) for hit in hits] for hits in expected]


def test_what_a_server_may_ignore_costs_no_body(server):
    body = b'{"queries": ["film directed city"], "topk": 1, "return_scores": true}'
    reads_all_that_was_sent(server.port, "/retrieve", body, (200, '"score"'))


def test_what_would_be_read_by_half_is_named(server):
    for path, body, status, told in (
        ("/retrieve?topk=5", b'{"queries": ["x"]}', 400, "address: found the parameters 'topk=5', expected none"),
        ("/retrieve", b'{"queries": ["x"], "queries": ["y"]}', 422, "the key 'queries' stands twice"),
        ("/retrieve", b'{"queries": ["x"], "top_k": 5}', 422, "body.top_k"),
    ):
        answer = httpx.post(f"{server.url}{path}", content=body)
        assert (answer.status_code, told in answer.json()["detail"]) == (status, True), answer.text
    foreign = httpx.post(f"{server.url}/retrieve", json={"queries": []}, headers={"host": "host.docker.internal:8001"})
    assert foreign.status_code == 403
    assert "--set names=[NAME]" in foreign.json()["detail"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_50_mb_is_refused_and_not_kept(server, declared):
    before = server.rss

    def blocks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 1_000_000

    content: Any = b" " * 50_000_000 if declared else blocks()
    refused = httpx.post(f"{server.url}/retrieve", content=content, timeout=30)
    assert refused.status_code == 413
    assert "expected at most 4194304" in refused.json()["detail"]
    assert server.rss - before < 15_000_000
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_slow_clients_are_sent_away(server):
    """Nothing at all, half a header, a header a second, half a body; meanwhile others are served."""
    half_body = b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    slow = {start: _connect(server) for start in (b"", b"POST /retrieve HTTP/1.1\r\nhos", half_body)}
    dripping = _connect(server)
    dripping.sendall(b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\n")
    for start, one in slow.items():
        one.sendall(start)
    assert httpx.post(f"{server.url}/retrieve", json={"queries": ["city"]}).status_code == 200
    with contextlib.suppress(ConnectionError):
        for i in range(40):
            dripping.sendall(f"x-{i}: y\r\n".encode())
            time.sleep(0.1)
    for one in (*slow.values(), dripping):
        answer = _read(one)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b'{"detail"' in answer
        one.close()
    assert httpx.post(f"{server.url}/retrieve", json={"queries": ["city"]}).status_code == 200


def test_clients_that_leave_early(server):
    body = json.dumps({"queries": ["city"] * 500, "topk": 20}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for sent in (head, head + body[:50], head + body):
        for _ in range(20):
            one = _connect(server)
            one.sendall(sent)
            one.close()
    assert httpx.post(f"{server.url}/retrieve", json={"queries": ["city"]}).status_code == 200
    text = httpx.get(f"{server.url}/metrics").text
    assert "search_requests_in_work 0.0" in text or "search_requests_in_work 1.0" in text


def test_what_is_not_http(server):
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /retrieve HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        one = _connect(server)
        one.sendall(sent)
        assert _read(one).startswith(b"HTTP/1.1 4")
        one.close()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_answer_left_unread_is_cut_off(world_index, tmp_path):
    """A client that never reads its large answers holds a connection and its buffer no longer than it may."""
    words = [word for one in ("write_timeout_s=0.5", "cache_bytes=0", "max_hits=50000") for word in ("--set", one)]
    body = json.dumps({"queries": [f"city {i}" for i in range(200)], "topk": 200}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with ServerProcess(world_index, "--port", "0", *words) as running:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", running.port))
        one.sendall(head + body)
        while (
            'search_requests_total{path="/retrieve",status="200"} 1.0' not in httpx.get(f"{running.url}/metrics").text
        ):
            time.sleep(0.05)
        time.sleep(1.5)
        one.settimeout(10)
        assert len(_read(one)) < 10_000_000  # It has some 17 MB.
        one.close()


class Load:
    """Clients that ask until told to stop, and what they got."""

    def __init__(self, url: str, count: int) -> None:
        self.url, self.stopping = url, threading.Event()
        self.answers: list[tuple[str, int, int]] = []  # (query, status or 0, hits)
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=30) as client:
            asked = 0
            while not self.stopping.is_set():
                query = f"city {number} {asked}"
                asked += 1
                try:
                    answer = client.post(f"{self.url}/retrieve", json={"queries": [query], "topk": 2})
                    hits = len(answer.json()["result"][0]) if answer.status_code == 200 else 0
                    self.answers.append((query, answer.status_code, hits))
                except httpx.TransportError:
                    self.answers.append((query, 0, 0))
                    time.sleep(0.05)

    def wait_for_answers(self, count: int, seconds: float = 60) -> None:
        """Until so many requests more have been answered."""
        until, before = time.monotonic() + seconds, self._answered
        while self._answered - before < count:
            assert time.monotonic() < until, self.answers[-3:]
            time.sleep(0.01)

    @property
    def _answered(self) -> int:
        return sum(status == 200 for _, status, _ in self.answers)

    def end(self) -> list[tuple[str, int, int]]:
        self.stopping.set()
        for thread in self.threads:
            thread.join(40)
        assert not any(thread.is_alive() for thread in self.threads)
        return self.answers


def test_killed_under_load_and_started_again(world_index, tmp_path):
    port = free_port()
    words = ("--port", str(port), "--set", f"cache_folder={tmp_path}/cache")
    with ServerProcess(world_index, *words) as first:
        load = Load(first.url, 6)
        load.wait_for_answers(50)
        first.end(signal.SIGKILL)
    killed_at = len(load.answers)
    with ServerProcess(world_index, *words) as second:
        load.wait_for_answers(50)
        answers = load.end()
        assert second.end() == 0
    failed = [answer for answer in answers if answer[1] != 200]
    assert killed_at > 20
    assert failed
    assert {status for _, status, _ in failed} <= {0, 503}
    assert all(hits == 2 for _, status, hits in answers if status == 200)  # Never an empty result.
    assert sum(status == 200 for _, status, _ in answers[killed_at:]) > 20


def test_a_graceful_stop_answers_what_is_in_work(world_index, tmp_path):
    with ServerProcess(world_index, "--port", "0", "--set", f"cache_folder={tmp_path}/cache") as running:
        load = Load(running.url, 6)
        load.wait_for_answers(50)
        status = running.end(signal.SIGTERM, 15)
        answers = load.end()
    assert status == 0, running.log.read_text()
    refused = [answer for answer in answers if answer[1] != 200]
    assert {status for _, status, _ in refused} <= {0, 503}
    first = next(i for i, answer in enumerate(answers) if answer[1] != 200)
    # What is in work is answered, one request a client at most; a later one finds no server or is refused.
    assert sum(status == 200 for _, status, _ in answers[first:]) <= 6
    assert "Traceback" not in running.log.read_text()


def test_a_graceful_stop_waits_for_a_long_request(world_index, tmp_path):
    """250 long queries that are being searched when the signal comes."""
    with ServerProcess(world_index, "--port", "0", "--set", "cache_bytes=0") as running:
        body = json.dumps({"queries": [f"{i} " + "film city mayor " * 300 for i in range(250)], "topk": 40}).encode()
        one = _connect(running)
        one.sendall(
            f"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        while "search_requests_in_work 1.0" not in httpx.get(f"{running.url}/metrics").text:
            time.sleep(0.005)
        running.process.send_signal(signal.SIGTERM)
        head, _, answer = _read(one).partition(b"\r\n\r\n")
        one.close()
        assert running.process.wait(30) == 0
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert [len(hits) for hits in json.loads(answer)["result"]] == [40] * 250


def test_stopped_while_idle_and_by_ctrl_c(world_index, tmp_path):
    with ServerProcess(world_index, "--port", "0", "--set", "cache_bytes=0") as running, httpx.Client() as client:
        client.get(f"{running.url}/health")  # A connection that stays open must not keep the server.
        assert running.end(signal.SIGINT) == 0
    assert "Traceback" not in running.log.read_text()


def test_make_leaves_nothing_behind(world_index, tmp_path):
    ends_with_make("search-server", f"INDEX={world_index}", f"ARGS=--set cache_folder={tmp_path}/cache")


def _fails(*words: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tasks.server", *words], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"PATH": "", **(env or {})},
    )  # fmt: skip
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def test_what_keeps_it_from_starting(world_index, world_corpus, tmp_path):
    index = str(world_index)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        told = _fails("--index", index, "--port", port)
        assert told.startswith(f"error: cannot have port {port} of 127.0.0.1 (Address already in use)")
    assert "no search index here (manifest.json is missing)" in _fails("--index", str(tmp_path), "--port", "0")
    other = tmp_path / "corpus.jsonl"
    other.write_text('{"id":"p","title":"","text":"other"}\n')
    assert "built from another corpus" in _fails("--index", index, "--port", "0", "--corpus", str(other))
    torn = tmp_path / "torn"
    retrieval.build(other, torn, Bm25("bm25"))
    (torn / "passages.jsonl").write_bytes(b"x")
    assert "the manifest says" in _fails("--index", str(torn), "--port", "0")


def test_what_keeps_it_from_listening_to_others(world_index):
    index = str(world_index)
    told = _fails("--index", index, "--host", "0.0.0.0", "--port", "0")
    assert "host=0.0.0.0: others can reach this address, and SEARCH_SERVER_API_KEY is not set" in told
    assert "exclude each other" in _fails("--index", index, "--without-key", env={"SEARCH_SERVER_API_KEY": "k" * 9})
    told = _fails("--index", index, env={"SEARCH_SERVER_API_KEY": "ünprintable"})
    assert "cannot hold" in told
    assert "ünprintable" not in told
    assert "unknown key 'max_bach'. Did you mean 'max_batch'" in _fails("--index", index, "--set", "max_bach=3")
    assert "unknown server 'magic'" in _fails("--index", index, "--settings", "magic")


def test_with_a_key_it_listens_to_others_and_never_tells_the_key(world_index, tmp_path):
    key = {"SEARCH_SERVER_API_KEY": "open-sesame"}
    words = ("--host", "0.0.0.0", "--port", "0", "--set", "cache_bytes=0")
    with ServerProcess(world_index, *words, env=key) as running:
        url = f"http://127.0.0.1:{running.port}/retrieve"
        assert httpx.post(url, json={"queries": ["a"]}).status_code == 401
        headers = {"authorization": "Bearer open-sesame"}
        assert httpx.post(url, json={"queries": ["a"]}, headers=headers).status_code == 200
        assert running.end() == 0
        assert "sesame" not in running.log.read_text()


def test_memory_stays_flat_under_load(server, tmp_path: Path):
    """After a warm-up, thousands of different queries add less than the cache's own buffers."""

    def play(start: int) -> int:
        with httpx.Client() as client:
            for i in range(start, start + 40):
                body = {"queries": [f"city {i} {j}" for j in range(50)], "topk": 5}
                assert client.post(f"{server.url}/retrieve", json=body).status_code == 200
        return server.rss

    play(0)
    before = play(100)
    assert play(1000) - before < 20_000_000


def _our_client(url: str, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setenv(remote.URL, url)
    monkeypatch.delenv(remote.KEY_VARIABLE, raising=False)
    settings = remote.Settings("remote", batch_size=7, max_in_flight=3, backoff_s=0.01, retries=1, **changes)
    retrieval.build(corpus, out, settings)
    return retrieval.open_retriever(out, corpus)


def test_our_client_gets_the_hits_of_a_local_search(server, local, world_corpus, tmp_path, monkeypatch):
    there = _our_client(server.url, world_corpus, tmp_path / "index", monkeypatch)
    queries = [f"film {word} city {number}" for number in range(20) for word in ("mayor", "director", "東京")]
    for top_k in (1, 5, 1000):
        assert there.search([*queries, "", "x" * 10_000], top_k) == local.search([*queries, "", "x" * 10_000], top_k)
    with pytest.raises(
        RetrievalError, match=r"status 422: body.queries\[0\]: String should have at most 16384 characters"
    ):
        there.search(["x" * 20_000], 1)


def test_our_client_tells_an_outage_and_recovers(world_index, world_corpus, tmp_path, monkeypatch):
    port = free_port()
    words = ("--port", str(port), "--set", "cache_bytes=0")
    with ServerProcess(world_index, *words) as first:
        options = {"breaker_failures": 4, "breaker_cool_down_s": 0.2}
        there = _our_client(first.url, world_corpus, tmp_path / "index", monkeypatch, **options)
        expected = there.search(["city"], 3)
        first.end(signal.SIGKILL)
    told = []
    for _ in range(5):
        with pytest.raises(RetrievalError) as failure:
            there.search(["city"], 3)
        told.append(str(failure.value))
    assert "ConnectError" in told[0]
    assert "not asked: 4 tries in a row have failed" in told[-1]
    with pytest.raises(DataError, match="make search-server"):
        retrieval.open_retriever(tmp_path / "index", world_corpus)
    with ServerProcess(world_index, *words):
        time.sleep(0.3)
        assert there.search(["city"], 3) == expected


def test_a_missing_or_wrong_key_is_noticed_at_once(world_index, world_corpus, tmp_path, monkeypatch):
    with ServerProcess(world_index, "--port", "0", env={"SEARCH_SERVER_API_KEY": "open-sesame"}) as running:
        monkeypatch.setenv(remote.URL, running.url)
        for key in ("", "another"):
            monkeypatch.setenv(remote.KEY_VARIABLE, key)
            with pytest.raises(DataError, match="refused with status 401: header Authorization") as failure:
                retrieval.build(world_corpus, tmp_path / "index", remote.Settings("remote"))
            assert "sesame" not in str(failure.value)
            assert not (tmp_path / "index").exists()


def test_our_client_does_not_take_hits_of_another_index(world_index, world_corpus, tmp_path, monkeypatch):
    """A server that was started again with another index of the same corpus."""
    words = ("--port", str(free_port()), "--set", "cache_bytes=0")
    with ServerProcess(world_index, *words) as first:
        there = _our_client(first.url, world_corpus, tmp_path / "index", monkeypatch)
        there.search(["city"], 3)
    retrieval.build(world_corpus, tmp_path / "other", Bm25("bm25", k1=0.9))
    told = r"found index [0-9a-f]{12}, expected index [0-9a-f]{12} as at the start"
    with ServerProcess(tmp_path / "other", *words), pytest.raises(RetrievalError, match=told):
        there.search(["city"], 3)
