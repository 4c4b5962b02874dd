"""The client: the same hits as a local search, and an error for whatever is not a complete answer."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import conf, retrieval, store
from tasks.data.records import split_contents
from tasks.retrieval import QueryError, RetrievalError, remote
from tasks.retrieval import manifest as manifests
from tasks.retrieval.bm25 import Settings as Bm25
from tasks.retrieval.remote import INDEX_HEADER, Breaker, Client, RemoteRetriever, Served, Settings
from tasks.store import DataError

QUICK = Settings("remote", backoff_s=0.001, max_backoff_s=0.002, timeout_s=5.0, retries=2)
SEARCH_R1 = replace(QUICK, protocol="search_r1")

Response = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class Stub:
    """An HTTP server that answers as told; remembers the requests."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Any], Response] = lambda path, body: (200, {})
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                stub.asked.append((self.path, body, dict(self.headers)))
                status, tree, *more = stub.answer(self.path, body)
                if status == 0:  # The connection ends without a word.
                    self.close_connection = True
                    return
                data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A client that leaves is part of these tests.

        self.http = Server(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    one = Stub()
    monkeypatch.setenv(remote.URL, one.url)
    monkeypatch.delenv(remote.KEY_VARIABLE, raising=False)
    yield one
    one.http.shutdown()
    one.http.server_close()


class SearchR1Shape:
    """What Search-R1's retrieval server does with a request: documents as they stand in its corpus, and scores."""

    def __init__(self, local: retrieval.Retriever, with_ids: bool = True) -> None:
        self.local, self.with_ids = local, with_ids

    def __call__(self, path: str, body: Any) -> Response:
        if path != "/retrieve":
            return 404, {"detail": "Not Found"}
        results = []
        for query in body["queries"]:
            (hits,) = self.local.search([query], body["topk"] or 3)
            documents = [{"id": h.passage_id, "contents": f'"{h.title}"\n{h.text}'} for h in hits]
            if not self.with_ids:
                documents = [{"contents": document["contents"]} for document in documents]
            if body["return_scores"]:
                documents = [{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)]
            results.append(documents)
        return 200, {"result": results}


class OurShape(SearchR1Shape):
    """Our server, written a second time."""

    def __init__(self, local: retrieval.Retriever, health: dict[str, Any]) -> None:
        super().__init__(local)
        self.health = health

    def __call__(self, path: str, body: Any) -> Response:
        if path == "/health":
            return 200, self.health
        status, tree, *_ = super().__call__(path, body)
        for hit in (hit for hits in tree["result"] for hit in hits):
            title, _, text = hit["document"]["contents"].partition("\n")
            hit["document"] |= {"title": title[1:-1], "text": text}
        return status, tree, {INDEX_HEADER: self.health["index_sha256"]}


@pytest.fixture
def built(corpus, town_passages, tmp_path) -> tuple[Path, retrieval.Retriever, dict[str, Any]]:
    """A corpus, its index opened here, and what /health says of it."""
    path = corpus(town_passages)
    manifest = retrieval.build(path, tmp_path / "local", Bm25("bm25"))
    health = {
        "status": "ready",
        "protocol": 1,
        "backend": "bm25",
        "index_sha256": store.sha256(tmp_path / "local" / "manifest.json"),
        "corpus_sha256": manifest["corpus_sha256"],
        "num_passages": 10,
        "max_queries": 100,
        "max_hits": 1000,
        "max_top_k": 100,
    }
    return path, retrieval.open_retriever(tmp_path / "local"), health


QUERIES = ["city of Switzerland", "", "river", "nowhere", "東京 Zürich", "city"]


def test_hits_are_those_of_a_local_search(stub, built, tmp_path):
    path, local, health = built
    stub.answer = OurShape(local, health)
    manifest = retrieval.build(path, tmp_path / "index", replace(QUICK, batch_size=2, max_in_flight=3))
    assert manifest["num_passages"] == 10
    assert manifest["details"]["index_sha256"] == health["index_sha256"]
    text = (tmp_path / "index" / "manifest.json").read_text()
    assert stub.url not in text
    assert "127.0.0.1" not in text
    there = retrieval.open_retriever(tmp_path / "index", path)
    for top_k in (1, 3, 10, 500):
        assert there.search(QUERIES, top_k) == local.search(QUERIES, top_k)
    assert there.search([], 3) == []
    assert max(len(body["queries"]) for _, body, _ in stub.asked if body) == 2
    with pytest.raises(ValueError, match="top_k=0"):
        there.search(["a"], 0)


def test_requests_keep_to_the_limits_of_the_server(stub, built, tmp_path):
    path, local, health = built
    stub.answer = OurShape(local, health | {"max_queries": 4, "max_hits": 10})
    retrieval.build(path, tmp_path / "index", QUICK)
    there = retrieval.open_retriever(tmp_path / "index", path)
    for top_k, most in ((1, 4), (3, 3), (10, 1), (500, 1)):
        stub.asked.clear()
        assert there.search(QUERIES, top_k) == local.search(QUERIES, top_k)
        assert max(len(body["queries"]) for _, body, _ in stub.asked) == most
    stub.answer = OurShape(local, health | {"max_top_k": 5})
    there = retrieval.open_retriever(tmp_path / "index", path)
    with pytest.raises(ValueError, match="top_k=6: the server gives at most 5 hits"):
        there.search(QUERIES, 6)


@pytest.mark.parametrize("with_ids", [True, False])
def test_search_r1s_server_will_do(stub, built, tmp_path, with_ids):
    path, local, _ = built
    stub.answer = SearchR1Shape(local, with_ids)
    with pytest.raises(DataError, match=r"/health: refused with status 404.*protocol: search_r1"):
        retrieval.build(path, tmp_path / "index", QUICK)
    retrieval.build(path, tmp_path / "index", SEARCH_R1)
    there = retrieval.open_retriever(tmp_path / "index", path)
    for found, hits in zip(there.search(QUERIES, 4), local.search(QUERIES, 4), strict=True):
        assert [(h.title, h.text, h.score) for h in found] == [(h.title, h.text, h.score) for h in hits]
        assert [h.passage_id for h in found] == [
            h.passage_id if with_ids else store.digest(remote.contents(h.title, h.text)) for h in hits
        ]


@given(st.text(), st.text())
def test_title_and_text_are_read_back_from_contents(title, text):
    title = title.replace("\n", " ")
    assert split_contents(remote.contents(title, text)) == (title, text)


def test_contents_without_quotes_or_text():
    assert split_contents("Bern\nA city.\nOld.") == ("Bern", "A city.\nOld.")
    assert split_contents('"') == ('"', "")
    assert split_contents("") == ("", "")


@settings(max_examples=30)
@given(scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_scores_cross_the_wire_bit_for_bit(scores):
    from tasks.server.app import encode_hits, render
    from tasks.types import Hit

    scores.sort(reverse=True)
    hits = [Hit(f"p{i}", score, "t", "x") for i, score in enumerate(scores)]
    with_scores = json.loads(render([encode_hits(hits)], True))
    found = RemoteRetriever(Client(QUICK), Served(len(hits)))._hits(with_scores, 1, len(hits))[0]
    assert [score.hex() for score in scores] == [hit.score.hex() for hit in found]
    assert found == hits


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"corpus_sha256": "0" * 64}, "serves a corpus of 10 passages with sha256 000000000000, expected 10"),
        ({"num_passages": 11}, "serves a corpus of 11 passages"),
        ({"protocol": 99}, "protocol: found 99, expected 1"),
        ({"index_sha256": None}, "expected num_passages, backend, index_sha256"),
    ],
)
def test_another_server_is_refused(stub, built, tmp_path, change, told):
    path, local, health = built
    stub.answer = OurShape(local, {**health, **change})
    with pytest.raises(DataError, match=told):
        retrieval.build(path, tmp_path / "index", QUICK)
    stub.answer = OurShape(local, health)
    retrieval.build(path, tmp_path / "index", QUICK)
    stub.answer = OurShape(local, {**health, **change})
    with pytest.raises(DataError, match=told):
        retrieval.open_retriever(tmp_path / "index", path)
    stub.answer = OurShape(local, {**health, "index_sha256": "1" * 64})
    with pytest.raises(DataError, match=r"serves index 111111111111, .*manifest.json was made when"):
        retrieval.open_retriever(tmp_path / "index", path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tree, headers: headers.clear(), "found no header x-index-sha256, expected index"),
        (lambda tree, headers: headers.update({INDEX_HEADER: "2" * 64}), "found index 222222222222, expected index"),
        (lambda tree, headers: tree["result"][1][0]["document"].update(text=""), r"result\[1\]\[0\]: found a passage"),
        (lambda tree, headers: tree["result"][0][1]["document"].update(text=" \n"), "a passage without text"),
        (lambda tree, headers: tree["result"][0][1]["document"].pop("text"), r"document\.text: found NoneType"),
    ],
)
def test_hits_that_are_not_whole_or_of_nobody_knows_which_index_are_refused(stub, built, tmp_path, change, told):
    path, local, health = built
    ours = stub.answer = OurShape(local, health)
    retrieval.build(path, tmp_path / "index", QUICK)
    client = retrieval.open_retriever(tmp_path / "index", path)
    assert client.search(["city", "river"], 2) == local.search(["city", "river"], 2)

    def changed(path: str, body: Any) -> Response:
        status, tree, headers = ours(path, body)
        change(tree, headers)
        return status, tree, headers

    stub.answer = changed
    stub.asked.clear()
    with pytest.raises(RetrievalError, match=told):
        client.search(["city", "river"], 2)
    assert len(stub.asked) == 1


@pytest.mark.parametrize(("status", "is_of_query"), [(400, True), (413, True), (422, True), (401, False), (404, False)])
def test_a_query_that_is_refused_is_told_from_a_server_that_refuses_all(stub, status, is_of_query):
    stub.answer = lambda path, body: (status, {"detail": "no"})
    with pytest.raises(RetrievalError, match=f"refused with status {status}: no") as refused:
        RemoteRetriever(Client(QUICK), Served(3)).search(["x"], 1)
    assert isinstance(refused.value, QueryError) is is_of_query


def test_no_server(built, tmp_path, monkeypatch):
    monkeypatch.setenv(remote.URL, "http://user:hidden@127.0.0.1:9")
    with pytest.raises(
        DataError, match=r"http://127.0.0.1:9/health: ConnectError.*\(3 tries\).*make search-server"
    ) as told:
        retrieval.build(built[0], tmp_path / "index", QUICK)
    assert "hidden" not in str(told.value)
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://[::"):
        monkeypatch.setenv(remote.URL, url)
        with pytest.raises(ValueError, match="SEARCH_SERVER_URL"):
            Client(QUICK)


def hits_of(count: int) -> list[dict[str, Any]]:
    return [{"document": {"id": f"p{i}", "title": "t", "text": "x"}, "score": 1.0 - i / 10} for i in range(count)]


def _search(stub: Stub, *answers: Response, queries: int = 2, **options: Any) -> Any:
    """What two queries with three hits each get from a server that gives these answers, the last for ever."""
    left = list(answers)
    stub.answer = lambda path, body: left.pop(0) if len(left) > 1 else left[0]
    return RemoteRetriever(Client(replace(QUICK, **options)), Served(100)).search([f"q{i}" for i in range(queries)], 3)


GOOD = (200, {"result": [hits_of(3), hits_of(3)]})


def _broken(field: str, value: Any) -> Response:
    hits = hits_of(3)
    if field == "score":
        hits[1]["score"] = value
    elif field == "document":
        hits[1]["document"] = value
    else:
        hits[1]["document"][field] = value
    return 200, json.dumps({"result": [hits_of(3), hits]}).encode()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, b""), "not a usable answer"),
        ((200, b'{"result": [['), "not a usable answer"),
        ((200, b"\xff"), "not a usable answer"),
        ((200, []), "result: found NoneType, expected a list of 2"),
        ((200, {"result": None}), "result: found NoneType, expected a list of 2"),
        ((200, {"result": []}), "result: found 0 results, expected a list of 2"),
        ((200, {"result": [hits_of(3)]}), "result: found 1 results, expected a list of 2"),
        ((200, {"result": [hits_of(3), hits_of(2)]}), r"result\[1\]: found 2 hits, expected a list of 3"),
        ((200, {"result": [hits_of(3), []]}), r"result\[1\]: found 0 hits, expected a list of 3"),
        ((200, {"result": [hits_of(4), hits_of(3)]}), r"result\[0\]: found 4 hits, expected a list of 3"),
        ((200, {"result": [hits_of(3), "abc"]}), r"result\[1\]: found str, expected a list of 3"),
        (_broken("score", math.nan), r"result\[1\]\[1\].score: found nan, expected a finite number"),
        (_broken("score", math.inf), "score: found inf"),
        (_broken("score", 10**400), "not a usable answer"),
        (_broken("score", None), "score: found None"),
        (_broken("score", "1.0"), "score: found '1.0'"),
        (_broken("score", True), "score: found True"),
        (_broken("text", None), r"result\[1\]\[1\].document.text: found NoneType, expected text"),
        (_broken("id", 7), "document.id: found int, expected text"),
        (_broken("document", "text"), "found no document"),
        (_broken("id", "p0"), r"result\[1\]: found a passage twice"),
        (_broken("score", 7.0), r"result\[1\]: found a better hit after a worse one, expected the best first"),
        ((200, b"[" * 100_000), "not a usable answer"),
        ((307, {}, {"location": "http://elsewhere/"}), "found a redirection"),
        ((422, {"detail": "body.topk: too large"}), "refused with status 422: body.topk: too large"),
        ((401, b"no JSON"), "refused with status 401: 'no JSON'"),
        ((500, {"detail": "a fault"}), "refused with status 500: a fault"),
    ],
)
def test_what_is_no_answer_is_an_error_at_once(stub, answer, told):
    with pytest.raises(RetrievalError, match=told):
        _search(stub, answer)
    assert len(stub.asked) == 1


@pytest.mark.parametrize("outage", [(429, {}), (502, b""), (503, {"detail": "starting"}), (504, {}), (0, b"")])
def test_an_outage_is_tried_again(stub, outage):
    assert [len(hits) for hits in _search(stub, outage, outage, GOOD)] == [3, 3]
    assert len(stub.asked) == 3
    with pytest.raises(RetrievalError, match=r"/retrieve: .*\(3 tries\)"):
        _search(stub, outage)
    assert len(stub.asked) == 6


@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_that_comes_byte_by_byte_is_given_up(part, tls, request, monkeypatch):
    """It would be whole and right after two seconds."""
    body = json.dumps({"result": [hits_of(3)]}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)
    context = None
    if tls:
        key, pem = request.getfixturevalue("certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem, key)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    pause = 2 / len(body) if part == "body" else 0.01

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection = listener.accept()[0]
            with context.wrap_socket(connection, server_side=True) if context else connection as one:
                one.recv(65536)
                drops = [body[i : i + 1] for i in range(len(body))]
                if part == "head":
                    drops = [b"x-%d: y\r\n" % i for i in range(200)]
                one.sendall(head + (b"\r\n" if part == "body" else b""))
                for drop in drops:
                    one.sendall(drop)
                    time.sleep(pause)
                one.sendall(b"\r\n" + body if part == "head" else b"")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        monkeypatch.setenv(remote.URL, f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}")
        client = Client(replace(QUICK, retries=0, timeout_s=0.5))
        with pytest.raises(RetrievalError, match=r"the answer took longer than 0.5 s \(1 tries\)"):
            RemoteRetriever(client, Served(100)).search(["q"], 3)
    thread.join()


def test_a_torn_or_slow_answer_is_tried_again(stub):
    part = json.dumps(GOOD[1]).encode()[:100]
    torn = (200, part, {"content-length": "500", "connection": "close"})
    slow = (200, part, {"content-length": "500"})
    assert len(_search(stub, torn, slow, GOOD, timeout_s=0.2)) == 2
    with pytest.raises(RetrievalError, match=r"RemoteProtocolError: .*\(1 tries\)"):
        _search(stub, torn, retries=0)
    with pytest.raises(RetrievalError, match=r"the answer took longer than 0.2 s \(1 tries\)"):
        _search(stub, slow, timeout_s=0.2, retries=0)


def test_pauses_grow_at_random_and_do_as_the_server_asks(stub):
    pauses: list[float] = []
    client = Client(replace(QUICK, retries=5, backoff_s=1.0, max_backoff_s=6.0), sleep=pauses.append)
    asked = iter(["", "", "", "5", "60", ""])
    stub.answer = lambda path, body: (503, {}, {"retry-after": next(asked)})
    with pytest.raises(RetrievalError):
        RemoteRetriever(client, Served(100)).search(["a", "b"], 3)
    for pause, (low, high) in zip(pauses, [(0.5, 1), (1, 2), (2, 4), (5, 6), (6, 6)], strict=True):
        assert low <= pause <= high
    assert len({round(pause, 6) for pause in pauses}) == 5


def test_the_breaker_opens_and_closes(stub, monkeypatch):
    now = 100.0
    client = Client(replace(QUICK, retries=0, breaker_failures=3, breaker_cool_down_s=10.0))
    client.breaker.clock = lambda: now
    there = RemoteRetriever(client, Served(100))
    stub.answer = lambda path, body: (503, {"detail": "down"})

    def fails(told: str, asked: int) -> None:
        with pytest.raises(RetrievalError, match=told):
            there.search(["a", "b"], 3)
        assert len(stub.asked) == asked

    for asked in (1, 2, 3):
        fails("status 503: down", asked)
    fails("not asked: 3 tries in a row have failed", 3)
    now = 111.0
    fails("status 503: down", 4)  # One trial, and closed again.
    fails("not asked", 4)
    now = 122.0
    stub.answer = lambda path, body: (422, {"detail": "too large"})
    fails("status 422", 5)  # A refusal is a sign of life.
    stub.answer = lambda path, body: GOOD
    assert len(there.search(["a", "b"], 3)) == 2


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_breaker_lets_calls_pass_until_failures_in_a_row(outcomes, failures):
    now = [0.0]
    breaker = Breaker(failures, 10.0, clock=lambda: now[0])
    in_a_row = 0
    for outcome in outcomes:
        assert breaker.allow() == (in_a_row < failures)
        if in_a_row >= failures:
            now[0] += 10.0
            assert breaker.allow()
            assert not breaker.allow()  # One trial at a time.
        breaker.record(outcome)
        in_a_row = 0 if outcome else in_a_row + 1


def test_the_size_of_an_answer_is_bounded(stub):
    with pytest.raises(RetrievalError, match="found more than 1000 bytes, expected at most max_response_bytes"):
        _search(stub, (200, b" " * 5_000_000), max_response_bytes=1000)


def test_the_key_is_sent_and_never_told(stub, monkeypatch):
    monkeypatch.setenv(remote.KEY_VARIABLE, "open-sesame")
    with pytest.raises(RetrievalError) as told:
        _search(stub, (401, {"detail": "another one"}))
    assert stub.asked[0][2]["authorization"] == "Bearer open-sesame"
    assert "sesame" not in str(told.value)
    monkeypatch.setenv(remote.KEY_VARIABLE, "two\nlines")
    with pytest.raises(ValueError, match="cannot hold") as wrong:
        Client(QUICK)
    assert "lines" not in str(wrong.value)


def test_an_address_may_end_in_retrieve(stub, monkeypatch):
    for end in ("/", "/retrieve", "/retrieve/"):
        monkeypatch.setenv(remote.URL, stub.url + end)
        assert len(_search(stub, GOOD)) == 2
    assert {path for path, _, _ in stub.asked} == {"/retrieve"}
    monkeypatch.setenv(remote.URL, stub.url + "/prefix")
    _search(stub, GOOD)
    assert stub.asked[-1][0] == "/prefix/retrieve"


def test_many_threads_share_one_client(stub, built):
    _, local, health = built
    stub.answer = OurShape(local, health)
    there = RemoteRetriever(Client(replace(QUICK, batch_size=2)), Served(10))
    wrong: list[Any] = []

    def ask(number: int) -> None:
        queries = [f"city {number}", QUERIES[number % 6], "river"]
        if there.search(queries, 1 + number % 4) != local.search(queries, 1 + number % 4):
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_settings_out_of_bounds():
    for change, told in [
        ({"retries": -1}, "retries=-1: expected 0 or more"),
        ({"batch_size": 0}, "batch_size=0: expected a number above 0"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: expected a number above 0"),
        ({"protocol": "other"}, "found 'other', expected one of 'breadcrumb', 'search_r1'"),
    ]:
        with pytest.raises(ValueError, match=told):
            conf.fill(Settings, {"backend": "remote", **change}, "here")
    root = Path(__file__).parents[2]
    assert retrieval.load_settings("remote", root) == Settings("remote")


def test_the_manifest_alone_is_the_index(stub, built, tmp_path):
    path, local, health = built
    stub.answer = OurShape(local, health)
    for name in ("one", "two"):
        retrieval.build(path, tmp_path / name, QUICK)
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["manifest.json"]
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "two" / "manifest.json").read_bytes()
    assert manifests.read(tmp_path / "one").corpus_sha256 == health["corpus_sha256"]
