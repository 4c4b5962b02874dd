"""A worker of the DeepSpeed engine that also tells its process, its bytes of tensors, and the files it has loaded."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from tasks import crew, identity
from tasks.engine.deepspeed_worker import Worker


def tensor_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def commands(stage: crew.Stage) -> dict[str, Any]:
    return Worker(stage).commands() | {"tensors": tensor_bytes, "loaded": identity.loaded, "pid": os.getpid}


if __name__ == "__main__":
    crew.work(commands)
