"""A parser of HTTP that takes no offer of another protocol, and reads the request that came with it as any other.

Java's client offers HTTP/2 with every request (`Upgrade: h2c`), and a server may ignore that (RFC 9110, 7.8). httptools
does not: it reports the request as complete without its body, and leaves the body unread.
"""

from __future__ import annotations

from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class Parser:
    """What a protocol of uvicorn uses of `httptools.HttpRequestParser`."""

    def __init__(self, protocol: Any) -> None:
        """Report what is read to `protocol`, whose `headers` are those of the request that is being read."""
        self._protocol = protocol
        self._is_known = False  # The head that is being read has been reported already.
        self._begin()

    def get_http_version(self) -> str:
        """See httptools."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """See httptools."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """See httptools."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """No offer is taken."""
        return False

    def feed_data(self, data: bytes) -> None:
        """Read the next bytes.

        Raises:
            HttpParserError: they are no HTTP.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            self._begin()
            self._is_known = True
            # The same head without the offer; only what says how long the body is matters now.
            framing = [b"%b: %b\r\n" % pair for pair in self._protocol.headers if pair[0] in _FRAMING]
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn does: a request that wants the connection closed may have others behind it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        """See httptools."""
        if not self._is_known:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._is_known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if not self._is_known:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if not self._is_known:
            self._protocol.on_headers_complete()
        self._is_known = False

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        """See httptools; with an offer the body is still to come."""
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()
