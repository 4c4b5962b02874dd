"""A worker for tests of the crew: it says, sums, sleeps, fails and dies as it is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tasks import crew, device


class AgreedError(ValueError):
    """An error that all workers report."""


def commands(stage: crew.Stage) -> dict[str, Callable[..., Any]]:
    """What the test may ask for."""

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
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": os._exit,
    }


if __name__ == "__main__":
    crew.work(commands)
