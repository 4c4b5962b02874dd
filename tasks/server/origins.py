"""Refuses requests that a web page sends through its reader's browser. Imports the standard library alone.

A server that listens on this machine trusts whoever reaches it, and every page that is open in a browser here reaches
it. Two headers tell pages apart, and no page can change them: Origin says whose page sends, and Host which name the
page asked for. The latter is foreign if the page's owner has pointed a name at this machine (DNS rebinding).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from tasks.server.problems import Problem, detail

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PLACE = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::[0-9]{1,5})?")
_MAX_SHOWN = 80
_POLICY_VIOLATION = 1008


class Guarded:
    """ASGI middleware that answers 403 to a foreign Host or Origin, also where a websocket is asked for."""

    def __init__(self, app: App, hosts: Collection[str] = (), problem: Problem = detail, advice: str = "") -> None:
        """Wrap an application.

        Args:
            app: the application.
            hosts: allowed besides the names of this machine and the address that a client connected to.
            problem: words the refusal.
            advice: how a user allows a further name.
        """
        self._app, self._problem, self._advice = app, problem, f". {advice}" if advice else ""
        self._hosts = frozenset(host.lower() for host in (*LOOPBACK, *hosts))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closed before it was accepted: the server answers 403.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal[:_MAX_SHOWN]})
        else:
            body = json.dumps(self._problem(403, refusal)).encode() + b"\n"
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Message) -> str | None:
        """What is wrong with a request, None if nothing is."""
        hosts, origins = (_sent(scope, name) for name in (b"host", b"origin"))
        connected_to = str((scope.get("server") or ("",))[0]).removeprefix("::ffff:")
        if len(hosts) != 1 or name_of(hosts[0]) not in {*self._hosts, connected_to}:
            expected = f"expected the address of this server or a name that it has{self._advice}"
            return f"header Host: found {_shown(hosts)}, {expected}"
        if any(origin.partition("://")[2] != hosts[0] for origin in origins):
            return f"header Origin: found {_shown(origins)}, expected none or {hosts[0]}: no other page may ask"
        return None


def name_of(place: str) -> str | None:
    """The name or address in a Host header, None if it is none.

    >>> name_of("localhost:8000"), name_of("[::1]:8000"), name_of("a@b"), name_of("")
    ('localhost', '::1', None, None)
    """
    found = _PLACE.fullmatch(place)
    return found and (found[1] or found[2])


def _sent(scope: Message, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip().lower() for key, value in scope["headers"] if key == name]


def _shown(values: list[str]) -> str:
    return ascii(", ".join(values))[:_MAX_SHOWN] if values else "none"
