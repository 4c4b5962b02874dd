"""A worker for tests of the crew: it says, sums, sleeps, fails and dies as it is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tasks import crew, device, wire

IN_RESULT = {"half_a_result": 12, "a_drop": 3}
"""Values of the variable STOP -> bytes of worker 1's first result that are sent before it stops."""


class AgreedError(ValueError):
    """An error that all workers report."""


def stop() -> None:
    """Do nothing more, as a process of a frozen host."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in(message: bytes, num_bytes: int) -> None:
    """Stop in the middle of the first message that holds this, after so many bytes of it and of its length."""
    send = wire.Wire.send

    def cut(self: wire.Wire, content: bytes) -> None:
        if message in content:
            self._peer.sendall((len(content).to_bytes(8, "big") + content)[:num_bytes])
            stop()
        send(self, content)

    wire.Wire.send = cut  # type: ignore[method-assign]


def commands(stage: crew.Stage) -> dict[str, Callable[..., Any]]:
    """What the test may ask for."""

    if os.environ.get("STOP") in IN_RESULT and stage.rank == 1:
        stop_in(b"done", IN_RESULT[os.environ["STOP"]])

    def fail(text: str, kind: str) -> None:
        raise {"agreed": AgreedError, "value": ValueError, "other": RuntimeError}[kind](text)

    def fail_first(text: str) -> None:
        if stage.rank == 0:
            fail(text, "agreed")

    def count(number: int) -> str:
        for part in range(number):
            if stage.rank == 0:
                stage.hand(part)
        return "counted"

    def total() -> int:
        return sum(stage.taken()) if stage.rank == 0 else -1

    return {
        "add": lambda a, b: a + b + stage.rank,
        "pid": os.getpid,
        "place": lambda: (stage.number, os.environ.get("CUDA_VISIBLE_DEVICES"), device.run()),
        "say": lambda text: print(text, flush=True),
        "sleep": time.sleep,
        "fail": fail,
        "fail_first": fail_first,
        "count": count,
        "total": total,
        "length": len,
        "stop_soon": threading.Timer(0.3, stop).start,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": os._exit,
    }


if __name__ == "__main__":
    crew.work(commands)
