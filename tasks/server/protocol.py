"""uvicorn's HTTP protocol with bounds on what comes before the application sees a request, and on slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tasks.server.offers import Parser
from tasks.server.problems import Problem
from tasks.server.settings import Settings

MAX_HEAD_BYTES = 64 << 10
FIELD_BYTES = 32
"""What a header counts besides its text, as in RFC 9113, 6.5.2: 64 KiB of tiny ones would be megabytes here."""
_TOO_LARGE = f"headers: found more than {MAX_HEAD_BYTES} bytes, expected at most these"
_GRACE_S = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections above the limit, those that send too much or too slowly, and those that do not read."""

    _head = 0  # Bytes of the address and of whole headers of this request, trailers among them.
    _unfinished = 0  # Bytes since the parser last made out anything.
    settings: Settings
    problem: Problem
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser: Any = Parser(self)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
        else:
            self._wait_for_reading(self.settings.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        # The parser keeps an unfinished header for itself, so nothing else sees how long it has become.
        if self._head + self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._answer_and_close(b"431 Request Header Fields Too Large", _TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        if self._head > MAX_HEAD_BYTES:  # `_count` has ended the parsing.
            self._answer_and_close(b"431 Request Header Fields Too Large", _TOO_LARGE)
        else:
            self._answer_and_close(b"400 Bad Request", msg)

    def on_message_begin(self) -> None:
        self._head = self._unfinished = 0
        super().on_message_begin()
        self._wait_for_reading(self.settings.read_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + FIELD_BYTES)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        super().on_headers_complete()
        # The server itself has stopped reading until earlier requests are answered: no fault of the client.
        if self.pipeline:
            self._stop_reading_timer()
        else:  # The guard times out a body that it reads; this timer is for bodies that no handler reads.
            self._wait_for_reading(self.settings.read_timeout_s + _GRACE_S, self.transport.close)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        self._stop_reading_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._writing or self.loop.call_later(self.settings.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        if self.flow is not None:
            super().resume_writing()

    def _wait_for_reading(self, seconds: float, give_up: Callable[[], None] | None = None) -> None:
        self._stop_reading_timer()
        self._reading = self.loop.call_later(seconds, give_up or self._give_up_reading)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up_reading(self) -> None:
        self._answer_and_close(b"408 Request Timeout", f"no complete request within {self.settings.read_timeout_s:g} s")

    def _count(self, num_bytes: int) -> None:
        self._head, self._unfinished = self._head + num_bytes, 0
        if self._head > MAX_HEAD_BYTES:
            raise ValueError(_TOO_LARGE)  # The parser stops, and `send_400_response` is called.

    def _answer_and_close(self, status: bytes, detail: str) -> None:
        # While an earlier request is being answered, another answer between would be taken for its own.
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            body = json.dumps(self.problem(int(status[:3]), detail)).encode()
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
            )
        self.transport.close()


def bounded_protocol(settings: Settings, problem: Problem) -> type[BoundedProtocol]:
    """The protocol with these bounds, whose refusals `problem` words; uvicorn takes a class."""
    return type("BoundedProtocol", (BoundedProtocol,), {"settings": settings, "problem": staticmethod(problem)})
