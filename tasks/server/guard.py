"""Checks requests before the application: state, key, number of requests, and size and speed of what a client sends.

A refused request costs only its headers; the server does not read its body. The messages say what was found and what
was expected, as JSON `{"detail": ...}` like every error of this server.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from tasks.server.metrics import Metrics
from tasks.server.origins import App, Message, Receive, Send
from tasks.server.settings import Settings

GUARDED = "/retrieve"
WITH_KEY = (GUARDED, "/metrics")
RETRY_AFTER_S = 1
_MAX_SHOWN = 80


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if status == 503:
            self.headers.setdefault("retry-after", str(RETRY_AFTER_S))


class GoneError(Exception):
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
        self._key = api_key

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
            await answer(sending, refused.status, {"detail": str(refused)}, refused.headers)
        except GoneError:
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
        self._count(1)
        try:
            body = await read_body(scope, receive, self._settings)

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            await self._app(scope, replay, send)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.in_work += change
        self._metrics.in_work.set(self.in_work)

    def _check_key(self, path: str, scope: Message) -> None:
        if path in WITH_KEY:
            check_key(scope, self._key)


def check_key(scope: Message, api_key: str | None) -> None:
    """Refuse a request without the key of this server; None lets everybody in.

    Raises:
        RefusedError: 401.
    """
    given = dict(scope["headers"]).get(b"authorization", b"")
    if api_key is not None and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
        found = "another one" if given else "none"
        detail = f"header Authorization: found {found}, expected 'Bearer ' and the key of this server"
        raise RefusedError(401, detail, www_authenticate="Bearer")


def require_no_parameters(scope: Message) -> None:
    """Refuse parameters in the address of a request whose body says everything: they would be left unread.

    Raises:
        RefusedError: 400.
    """
    if query := scope.get("query_string", b""):
        found = ascii(query.decode("latin-1"))[:_MAX_SHOWN]
        raise RefusedError(400, f"address: found the parameters {found}, expected none: put them into the body")


async def read_body(scope: Message, receive: Receive, settings: Settings) -> bytes:
    """The whole body of a request.

    Raises:
        RefusedError: 413 if it is larger than it may be, 408 if it comes too slowly.
        GoneError: the client left before its end.
    """
    limit, seconds = settings.max_body_bytes, settings.read_timeout_s
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
                    raise GoneError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise RefusedError(413, f"body: found more than {limit} bytes, expected at most {limit}")
                more = message.get("more_body", False)
    except TimeoutError:
        found = f"found {len(body)} bytes after {seconds:g} s"
        raise RefusedError(408, f"body: {found}, expected all of it", connection="close") from None
    return bytes(body)


async def answer(send: Send, status: int, tree: Any, more: Mapping[str, str] | None = None) -> None:
    """Send JSON, with these headers besides its own."""
    body = json.dumps(tree, ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **(more or {})}
    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})
