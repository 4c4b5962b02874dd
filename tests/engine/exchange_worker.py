"""A worker of the DeepSpeed engine that also adds up a table of numbers with the others, and counts what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from tasks import crew
from tasks.engine.deepspeed_worker import Worker

_sent = {"all_reduce": 0, "all_gather": 0}


def exchange(count: int) -> None:
    """Add up so many numbers on all workers."""
    distributed.all_reduce(torch.ones(count))


def sent() -> dict[str, int]:
    """Numbers of whole tables that were added up or put together since the last call."""
    found = dict(_sent)
    _sent.update(dict.fromkeys(_sent, 0))
    return found


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else options["tensor" if name == "all_reduce" else "output_tensor"]
        _sent[name] += sum(tensor.numel() for tensor in (first if isinstance(first, list) else [first]))
        return function(*arguments, **options)

    return call


def commands(stage: crew.Stage) -> dict[str, Any]:
    for name, kind in (
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
    ):
        setattr(distributed, name, _counted(kind, getattr(distributed, name)))
    return Worker(stage).commands() | {"exchange": exchange, "sent": sent}


if __name__ == "__main__":
    crew.work(commands)
