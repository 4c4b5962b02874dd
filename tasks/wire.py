"""Messages between a stage and its workers: a proof of a shared key, then bytes with their length before them.

Whoever listens never waits for the rest of a message: a worker may be stopped in the middle of one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

SHAKE_S = 20
"""Longest wait for the other side of a new connection."""
MOST_STRANGERS = 64
"""Connections that have not yet proved to know the key, at once; the oldest one has to go."""
_LENGTH = struct.Struct("!Q")
_TIME = struct.Struct("ll")


class Wire:
    """One side of a connection whose other side knows the key.

    Args:
        peer: connected and blocking.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._content: bytearray | None = None  # None while the length is read.
        self._buffer, self._filled = bytearray(_LENGTH.size), 0

    def fileno(self) -> int:
        """Of the socket, for `select`."""
        return self._peer.fileno()

    def close(self) -> None:
        """End the connection."""
        self._peer.close()

    def send(self, content: bytes) -> None:
        """Send one message.

        Raises:
            BlockingIOError: the other side has taken nothing for as long as `give_up_sending` says.
            OSError: the connection is gone.
        """
        self._peer.sendall(_LENGTH.pack(len(content)))
        self._peer.sendall(content)

    def give_up_sending(self, seconds: float) -> None:
        """Let `send` fail when the other side has taken nothing for so long."""
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(max(1, int(seconds)), 0))

    def take(self) -> bytearray | None:
        """A whole message, or None: its rest has not come. Reads what is there and waits for nothing.

        Raises:
            EOFError: the other side has closed.
            OSError: the connection is gone.
        """
        while True:
            while self._filled < len(self._buffer):
                try:
                    num = self._peer.recv_into(memoryview(self._buffer)[self._filled :], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                if not num:
                    raise EOFError
                self._filled += num
            done, is_length = self._buffer, self._content is None
            self._buffer = bytearray(_LENGTH.unpack(done)[0] if is_length else _LENGTH.size)
            self._filled = 0
            self._content = self._buffer if is_length else None
            if not is_length:
                return done

    def receive(self) -> bytearray:
        """The next message, whenever it comes.

        Raises:
            EOFError, OSError: as `take`.
        """
        while (content := self.take()) is None:
            wait([self._peer])
        return content


def waiting(wires: Iterable[Wire], seconds: float) -> list[Wire]:
    """Those with something to take; waits for the first one at most so long."""
    by_number = {wire.fileno(): wire for wire in wires}
    return [by_number[number] for number in wait(list(by_number), seconds) if isinstance(number, int)]


class Door:
    """Asks each newcomer of a listening socket for the key, in a thread of its own: a silent one keeps nobody waiting.

    Args:
        listener: with a timeout.
        key: that newcomers must know.
        silence_s: seconds after which a host that does not answer is lost.
    """

    def __init__(self, listener: socket.socket, key: bytes, silence_s: float) -> None:
        self._listener, self._key, self._silence_s = listener, key, silence_s
        self._strangers: dict[socket.socket, None] = {}
        self._known: queue.SimpleQueue[Wire] = queue.SimpleQueue()

    def newcomers(self) -> list[Wire]:
        """Those who have proved that they know the key since the last call; waits a moment for others.

        Raises:
            OSError: no connection can be accepted.
        """
        with contextlib.suppress(TimeoutError):
            peer = self._listener.accept()[0]
            self._strangers[peer] = None
            threading.Thread(target=self._ask, args=(peer,), daemon=True).start()
        while len(self._strangers) > MOST_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        return [self._known.get() for _ in range(self._known.qsize())]

    def close(self) -> None:
        """Send those away who have not proved it."""
        for peer in list(self._strangers):
            self._dismiss(peer)

    def _ask(self, peer: socket.socket) -> None:
        wire = shake(peer, self._key, self._silence_s, is_stage=True)
        self._strangers.pop(peer, None)
        if wire is not None:
            wire.give_up_sending(self._silence_s)
            self._known.put(wire)

    def _dismiss(self, peer: socket.socket) -> None:
        self._strangers.pop(peer, None)
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)  # Its thread sees this and closes it.


def shake(peer: socket.socket, key: bytes, silence_s: float, is_stage: bool) -> Wire | None:
    """A wire whose other side knows the key, None otherwise; whoever says nothing is cut off."""
    try:
        peer.settimeout(None)
        _watch(peer, silence_s)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(SHAKE_S, 0))
        with Connection(os.dup(peer.fileno())) as connection:
            for step in (deliver_challenge, answer_challenge) if is_stage else (answer_challenge, deliver_challenge):
                step(connection, key)
    except Exception:  # Wrong key, other protocol, silence, gone.
        peer.close()
        return None
    return Wire(peer)


def _watch(peer: socket.socket, silence_s: float) -> None:
    """Let the kernel end a connection whose other host has not answered for twice as long.

    Without this a worker on a host that is cut off would wait for its stage for ever. Twice, because the stage is to
    notice first: it has the words for it.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        num_questions, last_s = 4, 2 * silence_s
        every_s = max(1, int(last_s) // (num_questions + 1))
        for option, value in (
            ("TCP_KEEPIDLE", every_s),
            ("TCP_KEEPINTVL", every_s),
            ("TCP_KEEPCNT", num_questions),
            ("TCP_USER_TIMEOUT", int(last_s * 1000)),
        ):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
