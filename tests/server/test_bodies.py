"""What a body is coded in, and the mark before it, however a server hands it on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tasks.server.bodies import PlainBodies

MARK = b"\xef\xbb\xbf"


def read(parts: list[bytes]) -> bytes:
    """The body that an application reads whose client sent it in these parts."""
    found = b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal found
        while True:
            message = await receive()
            found += message.get("body", b"")
            if not message.get("more_body"):
                return

    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    asyncio.run(PlainBodies(app)(scope, receive, send))
    return found


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([MARK + b"{}"], b"{}"),
        ([MARK[:1], MARK[1:2], MARK[2:] + b"{", b"}"], b"{}"),
        ([b"", MARK[:2], MARK[2:], b"{}"], b"{}"),
        ([MARK[:2], b"{}"], MARK[:2] + b"{}"),
        ([b"{", MARK, b"}"], b"{" + MARK + b"}"),
        ([MARK], b""),
        ([MARK[:2]], MARK[:2]),
        ([MARK, MARK], MARK),
    ],
)
def test_one_mark_at_the_beginning_is_left_out(parts: list[bytes], expected: bytes) -> None:
    assert read(parts) == expected
