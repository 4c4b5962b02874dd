"""The blocks around a forward pass in training, and its backward pass: attention, and activations computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tasks.attention import IN_TRAINING, attend_in_training, attending
from tasks.shared_prefix import attention_to_prefixes


def reading(decoder: Any, share_prefixes: bool | str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """The block of a forward pass and its backward pass: the decoder's attention is the one that they need."""
    if share_prefixes:
        return attention_to_prefixes(decoder)
    return attending(decoder, IN_TRAINING, attend_in_training) if dtype == torch.bfloat16 else nullcontext()


@contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Switches gradient checkpointing on for the forward pass of an update.

    Layers obey that setting only in training mode. The mode of their children does not change, so dropout stays off.
    Outside the block a generator may use its cache, which checkpointing layers would refuse.
    """
    from tasks.pretrained import GradientCheckpointingLayer

    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = bool(layer.gradient_checkpointing)
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def recompute_activations(model: Any) -> None:
    """Let the layers of a model forget activations and compute them again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
