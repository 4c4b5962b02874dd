"""HTTP with one deadline for a whole exchange: a server that sends a byte now and then cannot keep its caller.

httpx bounds every wait for bytes, not their sum; here each wait is cut to what is left until the deadline.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from typing import Any

import httpcore
import httpx


class Deadline(threading.local):
    """When the exchange that this thread carries out must be over.

    Attributes:
        until: on the monotonic clock.
    """

    until: float = math.inf

    def cut(self, seconds: float | None) -> float | None:
        """A wait of so many seconds (None: for ever), shortened to what is left.

        Raises:
            httpcore.ReadTimeout: nothing is left.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the deadline has passed")
        waits = min(left, math.inf if seconds is None else seconds)
        return None if waits == math.inf else waits


class DeadlineTransport(httpx.HTTPTransport):
    """httpx's transport without proxies, with a deadline."""

    def __init__(self, deadline: Deadline, context: ssl.SSLContext | None, connections: int) -> None:
        """Make a pool of that many connections; `context` None is for addresses without TLS."""
        super().__init__(trust_env=False, verify=context or True)
        self._pool = httpcore.ConnectionPool(
            ssl_context=context, max_connections=connections, keepalive_expiry=30.0, network_backend=_Backend(deadline)
        )


class _Backend(httpcore.SyncBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *more: Any, **options: Any) -> Any:
        stream = super().connect_tcp(host, port, self._deadline.cut(timeout), *more, **options)
        return _Stream(stream, self._deadline)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.cut(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.cut(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.cut(timeout))
        return _Stream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
