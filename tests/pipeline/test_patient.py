"""Requests that are handed on again while the answer is 503."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flows.server import Patient

ASKED = [
    {"type": "http.request", "body": b"one ", "more_body": True},
    {"type": "http.request", "body": b"two", "more_body": False},
    {"type": "http.disconnect"},
]


class BusyError(Exception):
    pass


class App:
    """Answers 503 some times and raises, as Starlette does, then 201 with what it was sent."""

    def __init__(self, busy: int) -> None:
        self.busy = busy
        self.read: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert "route" not in scope, "a scope is used once"
        scope["route"] = "found"
        read = b""
        while (message := await receive())["type"] == "http.request":
            read += message["body"]
        self.read.append(read)
        is_busy = len(self.read) <= self.busy
        await send({"type": "http.response.start", "status": 503 if is_busy else 201, "headers": []})
        await send({"type": "http.response.body", "body": b"busy" if is_busy else read})
        if is_busy:
            raise BusyError


def _ask(app: Any, kind: str = "http", pauses: tuple[float, ...] = (0.0, 0.0)) -> list[Any]:
    sent: list[Any] = []
    coming = iter(ASKED)

    async def receive() -> Any:
        return next(coming, ASKED[-1])

    async def send(message: Any) -> None:
        sent.append(message.get("status", message.get("body")))

    asyncio.run(Patient(app, pauses)({"type": kind}, receive, send))
    return sent


@pytest.mark.parametrize("busy", [0, 1, 2])
def test_the_first_other_answer_is_sent(busy: int) -> None:
    app = App(busy)
    assert _ask(app) == [201, b"one two"]
    assert app.read == [b"one two"] * (busy + 1)


def test_the_last_answer_is_sent_and_raised_as_it_is() -> None:
    app = App(3)
    with pytest.raises(BusyError):
        _ask(app)
    assert len(app.read) == 3


def test_another_error_is_raised_at_once() -> None:
    calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope)
        await send({"type": "http.response.start", "status": 500, "headers": []})
        raise BusyError

    with pytest.raises(BusyError):
        _ask(app)
    assert len(calls) == 1


def test_a_websocket_is_handed_on_as_it_is() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "body": await receive()})

    assert _ask(app, "websocket") == [ASKED[0]]
