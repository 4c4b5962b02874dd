"""A worker of the DeepSpeed engine that also exchanges a table of numbers with the others, as gradients are."""

from __future__ import annotations

from typing import Any

from tasks import crew
from tasks.engine.deepspeed_worker import Worker


def exchange(count: int) -> None:
    """Add up so many numbers and leave each worker its share."""
    import torch
    from torch import distributed

    numbers = torch.ones(count)
    share = torch.empty(count // distributed.get_world_size())
    distributed.reduce_scatter_tensor(share, numbers)


def commands(stage: crew.Stage) -> dict[str, Any]:
    return Worker(stage).commands() | {"exchange": exchange}


if __name__ == "__main__":
    crew.work(commands)
