"""What pages and broken clients send to a server that listens on this machine, on raw sockets and in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tasks.server.origins import Guarded, Message
from tests.report.browser import Browser
from tests.server.attacks import exchange, get, refuses_foreign_requests, refuses_headers_without_end
from tests.server.running import ServerProcess, free_port
from tests.skips import needs_chromium

pytestmark = [pytest.mark.slow, pytest.mark.servers]
ASK = json.dumps({"queries": ["city"], "topk": 1})


def test_a_foreign_host_or_origin_is_refused(server: ServerProcess) -> None:
    for path in ("/health", "/retrieve", "/docs", "/nothing"):
        refuses_foreign_requests(server.port, path)
    assert httpx.post(f"{server.url}/retrieve", content=ASK).status_code == 200


def test_headers_without_end_are_refused(server: ServerProcess) -> None:
    refuses_headers_without_end(server.port, server.process.pid, "/retrieve")
    assert httpx.post(f"{server.url}/retrieve", content=ASK).status_code == 200


def test_many_requests_on_a_connection_are_counted_each_for_itself(server: ServerProcess) -> None:
    """Pipelined ones in one read as well, whose heads and bodies together are above the limit."""
    padding = b"x: " + b"a" * 20_000 + b"\r\n"
    body = json.dumps({"queries": ["city", "x" * 9_000], "topk": 1}).encode()
    one = b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\n" + padding + b"content-length: %d\r\n\r\n" % len(body) + body
    answers = exchange(server.port, one * 8 + one.replace(padding, b"connection: close\r\n"))
    assert answers.count(b"HTTP/1.1 200 OK") == 9


def test_names_of_a_server_that_others_reach(world_index: Path, tmp_path: Path) -> None:
    words = ("--host", "0.0.0.0", "--port", "0", "--without-key", "--set", "names=[node7.example]")
    with ServerProcess(world_index, *words, "--set", f"cache_folder={tmp_path}") as running:
        for name in ("node7.example", "NODE7.example:80", "127.0.0.1", "localhost:1"):
            assert get(running.port, f"host: {name}\r\n").startswith(b"HTTP/1.1 200 "), name
        refuses_foreign_requests(running.port, "/retrieve")


def test_a_name_is_no_address_with_a_port(world_index: Path) -> None:
    running = ServerProcess(world_index, "--set", "names=[node7:8000]")
    assert running.process.wait(30) == 1
    assert "names[0]: found 'node7:8000', expected a name without port" in running.log.read_text()
    running.process.stdout.close()  # type: ignore[union-attr]


# A page of somebody else ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def page() -> Iterator[str]:
    """An empty page on a port of its own: another origin."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>page</title>")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://localhost:{one.server_port}"
        one.shutdown()


def visit(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", url=url)
    until = time.monotonic() + 20
    while browser.run("location.href + document.readyState") != f"{url}complete":
        assert time.monotonic() < until
        time.sleep(0.05)


def fetched(browser: Browser, url: str, options: str) -> Any:
    """What `fetch` gives: status, type, and how long the text is that the page may read."""
    script = f"fetch('{url}', {options}).then(async a => [a.status, a.type, (await a.text()).length], () => ['failed'])"
    return browser.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)["result"]["value"]


@needs_chromium
def test_a_page_of_another_origin_can_ask_nothing(server: ServerProcess) -> None:
    simple = f"{{method: 'POST', mode: 'no-cors', headers: {{'content-type': 'text/plain'}}, body: '{ASK}'}}"
    with_json = f"{{method: 'POST', headers: {{'content-type': 'application/json'}}, body: '{ASK}'}}"
    counted = 'search_requests_total{path="/retrieve",status="200"}'

    def answered() -> list[str]:
        return [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line.startswith(counted)]

    with page() as foreign, Browser() as browser:
        visit(browser, f"{server.url}/docs")
        assert fetched(browser, f"{server.url}/retrieve", with_json)[:2] == [200, "basic"]  # Its own page may.
        before = answered()
        visit(browser, f"{foreign}/")
        assert fetched(browser, f"{server.url}/retrieve", with_json) == ["failed"]  # The preflight is refused.
        assert fetched(browser, f"{server.url}/retrieve", simple) == [0, "opaque", 0]  # Sent without a preflight.
        assert fetched(browser, f"{server.url}/health", "{}") == ["failed"]
    assert answered() == before


def test_a_websocket_of_a_page_is_refused() -> None:
    """Around any application, as Prefect's: an event stream is no less open to pages than a request."""

    async def app(scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})

    port = free_port()
    config = uvicorn.Config(Guarded(app), port=port, lifespan="off", log_level="error")
    upgrade = (
        "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )

    def asked(headers: str) -> bytes:
        return exchange(port, f"GET / HTTP/1.1\r\n{headers}{upgrade}\r\n".encode(), seconds=1)[:12]

    async def session() -> None:
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        own = f"host: localhost:{port}\r\n"
        assert await asyncio.to_thread(asked, own) == b"HTTP/1.1 101"
        assert await asyncio.to_thread(asked, f"{own}origin: http://localhost:{port}\r\n") == b"HTTP/1.1 101"
        assert await asyncio.to_thread(asked, f"{own}origin: http://evil.example\r\n") == b"HTTP/1.1 403"
        assert await asyncio.to_thread(asked, "host: evil.example\r\n") == b"HTTP/1.1 403"
        running.should_exit = True
        await task

    asyncio.run(session())
