"""Attacks on whatever listens: headers without end, and what a browser sends for a page of somebody else."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import time
from pathlib import Path

from tasks.server.protocol import MAX_HEAD_BYTES

ONE_READ = 256 << 10  # What asyncio reads at once.
FOREIGN = (
    "host: evil.example\r\n",
    "host: 127.0.0.1.evil.example:{port}\r\n",
    "host: localhost:{port}\r\nhost: evil.example\r\n",
    "host: 127.0.0.1:{port}\r\norigin: http://evil.example\r\n",
    "host: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:1\r\n",
    "host: 127.0.0.1:{port}\r\norigin: null\r\n",
    "host: \r\n",
    "",
)


def exchange(port: int, *sent: bytes, seconds: float = 5.0) -> bytes:
    """All that a server answers to these bytes until it closes, or until it has been silent for so long."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as one:
        received = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            for block in sent:
                one.sendall(block)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while block := one.recv(65536):
                received += block
    return received


H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAA\r\n"
HARMLESS = {
    "what Java offers": H2C,
    "a websocket": "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "other protocols": "connection: keep-alive, upgrade\r\nupgrade: TLS/1.0, IRC/6.9\r\n",
    "an offer without its connection": "upgrade: h2c\r\n",
    "expects": "expect: 100-continue\r\n",
    "trailers": "te: trailers, deflate;q=0.5\r\ntrailer: x\r\n",
    "repeated": "x-a: 1\r\nx-a: 2\r\ncache-control: no-cache\r\ncache-control: no-store\r\n",
    "no coding": "content-encoding: identity\r\n",
    "wishes": "priority: u=1\r\naccept-language: de;q=0.1\r\naccept-encoding: gzip, br\r\nprefer: wait=1\r\n",
}
"""Headers that change nothing about what a request asks."""
CODED = ("content-encoding: gzip", "content-encoding: identity, br", "content-type: text/plain; charset=utf-16",
         "content-type: application/json; charset=utf-8; charset=utf-16")  # fmt: skip


def reads_all_that_was_sent(port: int, path: str, body: bytes, expected: tuple[int, str], more: str = "") -> None:
    """A body is read whole beside headers that a server may ignore, with the mark of UTF-8 before it, and in parts.

    Args:
        port, path: of the server.
        body: what is sent.
        expected: status, and words of the answer that nobody can know who has not read the body.
        more: headers that are always sent.
    """
    plain = sent(port, path, body, more)
    assert (plain[0], expected[1] in plain[1]) == (expected[0], True), plain
    for name, headers in HARMLESS.items():
        assert sent(port, path, body, more + headers) == plain, name
        assert sent(port, path, body, more + headers, is_chunked=True) == plain, name
    assert sent(port, path, b"\xef\xbb\xbf" + body, more) == plain
    assert sent(port, path, b"\xef\xbb\xbf" + body, more + H2C, is_chunked=True) == plain
    for header in CODED:
        status, told = sent(port, path, body, f"{more}{header}\r\n")
        assert (status, header.rpartition(" ")[2].rpartition("=")[2] in told) == (415, True), told
    status, told = sent(port, path, body, f"{more}transfer-encoding: gzip\r\n", is_chunked=True)
    assert (status == 400) or (status, "gzip" in told) == (415, True), told

    # The next requests on the same connection are read as well, offers or not.
    one = head(path, more + H2C, f"content-length: {len(body)}\r\n") + body
    last = head(path, f"{more}{H2C}connection: close\r\n", f"content-length: {len(body)}\r\n") + body
    assert exchange(port, one * 2 + last, seconds=30).count(f"HTTP/1.1 {expected[0]} ".encode()) == 3


def head(path: str, headers: str, framing: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}{framing}\r\n".encode()


def sent(port: int, path: str, body: bytes, headers: str, is_chunked: bool = False) -> tuple[int, str]:
    """Status and body of the answer to a POST."""
    cut = len(body) // 3
    if is_chunked:
        framing, parts = "transfer-encoding: chunked\r\n", [body[:2], body[2:cut], body[cut:]]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        framing = f"content-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
        one.sendall(head(path, headers, framing) + body[:cut])
        one.sendall(body[cut:])
        response = http.client.HTTPResponse(one)
        response.begin()
        return response.status, response.read().decode()


def get(port: int, headers: str, path: str = "/health", method: str = "GET") -> bytes:
    """The answer to a request with these headers and no others."""
    return exchange(port, f"{method} {path} HTTP/1.1\r\n{headers}connection: close\r\n\r\n".encode())


def refuses_foreign_requests(port: int, path: str) -> None:
    """A Host or an Origin that is not the server's: 403 and one line; its own ones are no matter."""
    for headers in FOREIGN:
        for method in ("GET", "POST", "OPTIONS"):
            answer = get(port, headers.format(port=port), path, method)
            assert answer.startswith(b"HTTP/1.1 403 "), (headers, answer)
            assert b"access-control" not in answer.lower()
            assert answer.partition(b"\r\n\r\n")[2].count(b"\n") == 1
    for own in ("host: localhost\r\n", f"host: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:{port}\r\n"):
        assert b" 403 " not in get(port, own, path).partition(b"\r\n")[0]


def refuses_headers_without_end(port: int, pid: int, path: str) -> None:
    """431 as soon as they are too large, however they are sent, and no memory for them."""
    start = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
    size = MAX_HEAD_BYTES + ONE_READ
    trailers = start + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    for name, sent in {
        "one header": start + b"x: " + b"a" * size,
        "one name": start + b"a" * size,
        "many headers": start + b"x: aaaaaaaa\r\n" * (size // 13),
        "tiny headers": start + b"a:\r\n" * (MAX_HEAD_BYTES // 16),
        "whole": start + b"x: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        "address": b"GET /" + b"a" * size,
    }.items():
        assert exchange(port, sent).startswith(b"HTTP/1.1 431 "), name
    # An answer may be on its way when trailers come, so the connection just ends.
    before = time.monotonic()
    exchange(port, trailers, b"x: " + b"a" * size)
    assert time.monotonic() - before < 4

    before_bytes = resident_bytes(pid)
    block = b"x: " + b"a" * 900 + b"\r\n"
    for sent in (block, b"a" * len(block)):
        assert exchange(port, start, *[sent * 1000] * 100)[:12] in (b"HTTP/1.1 431", b"")
    assert resident_bytes(pid) - before_bytes < 10_000_000
    many = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 500) for number in range(100))
    assert b" 431 " not in exchange(port, start + many + b"content-length: 0\r\nconnection: close\r\n\r\n")[:20]


def resident_bytes(pid: int) -> int:
    """A process's memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
