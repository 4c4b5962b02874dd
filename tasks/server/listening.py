"""A port of this machine, and the server on it: what every server of this project has in common."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from tasks.server.bodies import PlainBodies
from tasks.server.origins import App, Guarded
from tasks.server.problems import Problem, detail
from tasks.server.protocol import bounded_protocol
from tasks.server.settings import Settings

_FILES = 65_536
_OTHER_NAMES = "Allow a name with --set names=[NAME], or with `names` of conf/server/default.yaml."


class Server(uvicorn.Server):
    """Answers what browsers' pages did not send, within the bounds of its settings."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        stopping: Callable[[], None] = lambda: None,
        problem: Problem = detail,
    ) -> None:
        """Serve an application.

        Args:
            app: the application.
            settings: bounds.
            stopping: called at the signal, before the last requests are answered.
            problem: words what is refused before the application sees it.
        """
        self._stopping = stopping
        config = uvicorn.Config(
            Guarded(PlainBodies(app, problem), (settings.host, *settings.names), problem, _OTHER_NAMES),
            http=bounded_protocol(settings, problem),
            ws="none",
            access_log=False,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=settings.stop_timeout_s,
            backlog=settings.max_connections,
        )
        super().__init__(config)

    def answer(self, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests that come to `listener` until SIGTERM or Ctrl-C; returns when the last one is answered.

        Args:
            listener: a bound socket.
            ready: called when it accepts requests and a signal would end it in order.
        """
        self._ready = ready
        _allow_many_connections()
        for number in (signal.SIGTERM, signal.SIGINT):  # Also for the signal that uvicorn raises again at the end.
            signal.signal(number, self.handle_exit)
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no further request."""
        self._stopping()
        super().handle_exit(sig, frame)


def listening(settings: Settings, is_shared: bool = False) -> contextlib.closing[socket.socket]:
    """A socket on the port, opened before anything slow so that a taken port is reported at once.

    Other processes of this user may have the port as well, if it `is_shared` by all of them.

    Raises:
        ValueError: the port is taken or the address is not one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"cannot have port {settings.port} of {settings.host} ({error.strerror}); is another server running? "
            "Choose another port: make ... PORT=..., or --port."
        ) from None
    return contextlib.closing(listener)


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
