"""Refuses bodies whose headers say that they are no plain UTF-8, and leaves out the mark at the beginning of a file.

A server that ignored these headers would read something else than was sent.
"""

from __future__ import annotations

import json
import re

from tasks.server.origins import App, Message, Receive, Send
from tasks.server.problems import Problem, detail

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\";\s]*)", re.IGNORECASE)
_PLAIN_CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")
_CODINGS = {"Content-Encoding": ("", "identity"), "Transfer-Encoding": ("", "identity", "chunked")}
"""Headers that say how a body is coded, and what leaves it plain."""
_MARK = b"\xef\xbb\xbf"
_MAX_SHOWN = 40


class PlainBodies:
    """ASGI middleware: 415 for a compressed body or one in another encoding of characters; see the module."""

    def __init__(self, app: App, problem: Problem = detail) -> None:
        """Wrap `app`; `problem` words the refusal."""
        self._app, self._problem = app, problem

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] != "http" or not _has_body(scope):
            return await self._app(scope, receive, send)
        if (refusal := _refusal(scope)) is None:
            return await self._app(scope, _without_mark(receive), send)
        body = json.dumps(self._problem(415, refusal)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                   (b"accept-encoding", b"identity")]  # fmt: skip
        await send({"type": "http.response.start", "status": 415, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return None


def _has_body(scope: Message) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


def _refusal(scope: Message) -> str | None:
    sent = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
    for header, plain in _CODINGS.items():
        said = [value for name, value in sent if name == header.lower().encode()]
        for coding in (one.strip() for value in said for one in value.split(",")):
            if coding.lower() not in plain:
                return f"header {header}: found {_shown(coding)}, expected none: send the body uncompressed"
    for name, value in sent:
        for charset in _CHARSET.findall(value) if name == b"content-type" else ():
            if charset.lower() not in _PLAIN_CHARSETS:
                return f"header Content-Type: found charset {_shown(charset)}, expected utf-8: send JSON in UTF-8"
    return None


def _without_mark(receive: Receive) -> Receive:
    is_begun = False

    async def received() -> Message:
        nonlocal is_begun
        message = await receive()
        if is_begun or message["type"] != "http.request":
            return message
        is_begun = True
        body: bytes = message.get("body", b"")
        # The mark may come in parts.
        while len(body) < len(_MARK) and _MARK.startswith(body) and message.get("more_body", False):
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
        return {**message, "body": body.removeprefix(_MARK)}

    return received


def _shown(text: str) -> str:
    return ascii(text)[:_MAX_SHOWN]
