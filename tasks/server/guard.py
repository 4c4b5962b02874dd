"""Checks requests before the application: state, key, number of requests, and size and speed of what a client sends.

A refused request costs only its headers; the server does not read its body. The messages say what was found and what
was expected, as JSON `{"detail": ...}` like every error of this server.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tasks.server.metrics import Metrics
from tasks.server.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

GUARDED = "/retrieve"
WITH_KEY = (GUARDED, "/metrics")
RETRY_AFTER_S = 1
_GRACE_S = 1.0


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if status == 503:
            self.headers.setdefault("retry-after", str(RETRY_AFTER_S))


class _GoneError(Exception):
    """The client closed the connection before its request was complete."""


class Guard:
    """ASGI middleware around the application; see the module.

    Attributes:
        in_work: retrieve requests being answered.
    """

    def __init__(
        self, app: App, settings: Settings, metrics: Metrics, api_key: str | None, state: Callable[[], str]
    ) -> None:
        """Wrap `app`; `state()` is `ready` or names another state, `api_key` None lets everybody in."""
        self.in_work = 0
        self._app, self._settings, self._metrics, self._state = app, settings, metrics, state
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, started, status = str(scope["path"]), time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_key(path, scope)
            if path == GUARDED and scope["method"] == "POST":
                await self._retrieve(scope, receive, sending)
                self._metrics.seconds.observe(time.perf_counter() - started)
            else:
                await self._app(scope, receive, sending)
        except RefusedError as refused:
            await refuse(refused, sending)
        except _GoneError:
            status = 499  # The status that web servers log for a client that has left; there is nobody to answer.
        finally:
            self._metrics.answered(path, status)
        return None

    async def _retrieve(self, scope: Message, receive: Receive, send: Send) -> None:
        if (state := self._state()) != "ready":
            raise RefusedError(503, f"the server is {state}")
        if self.in_work >= self._settings.max_requests:
            raise RefusedError(
                503, f"{self.in_work} requests are in work, at most {self._settings.max_requests} may be"
            )
        self.in_work += 1
        try:
            body = await self._body(scope, receive)

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            await self._app(scope, replay, send)
        finally:
            self.in_work -= 1

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        limit, seconds = self._settings.max_body_bytes, self._settings.read_timeout_s
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise RefusedError(413, f"body: found {int(declared[:20])} bytes, expected at most {limit}")
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise RefusedError(413, f"body: found more than {limit} bytes, expected at most {limit}")
                    more = message.get("more_body", False)
        except TimeoutError:
            found = f"found {len(body)} bytes after {seconds:g} s"
            raise RefusedError(408, f"body: {found}, expected all of it", connection="close") from None
        return bytes(body)

    def _check_key(self, path: str, scope: Message) -> None:
        if self._key is not None and path in WITH_KEY:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                found = "another one" if given else "none"
                detail = f"header Authorization: found {found}, expected 'Bearer ' and the key of this server"
                raise RefusedError(401, detail, www_authenticate="Bearer")


async def refuse(refused: RefusedError, send: Send) -> None:
    """Send the answer to a refused request."""
    body = json.dumps({"detail": str(refused)}, ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


def bounded_protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol with a bound on connections, on slow senders and on slow readers."""

    class BoundedProtocol(HttpToolsProtocol):
        """Closes connections above the limit, those that send too slowly, and those whose answers are not read."""

        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.abort()
            else:
                self._wait_for_reading(settings.read_timeout_s)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_reading_timer()
            self.resume_writing()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_reading(settings.read_timeout_s)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            # The server itself has stopped reading until earlier requests are answered: no fault of the client.
            if self.pipeline:
                self._stop_reading_timer()
            else:  # The guard times out a body that it reads; this timer is for bodies that no handler reads.
                self._wait_for_reading(settings.read_timeout_s + _GRACE_S, self.transport.close)

        def on_message_complete(self) -> None:
            self._stop_reading_timer()
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self._writing or self.loop.call_later(settings.write_timeout_s, self.transport.abort)

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
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                body = json.dumps({"detail": f"no complete request within {settings.read_timeout_s:g} s"}).encode()
                self.transport.write(
                    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
            self.transport.close()

    return BoundedProtocol
