"""The adapters of a policy by the names that their weights have in a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.generate.adapters import DOWN, UP

ADAPTER = "default"
"""The name that peft gives to the only adapter of a layer."""
_PREFIX = "base_model.model."


def adapted_layers(model: Any) -> dict[str, Any]:
    """The layers of a peft model that have adapters, by the name of their weight in the exported model."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name.removeprefix(_PREFIX)}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def outline_of(layers: Mapping[str, Any]) -> tuple[tuple[str, ...], int, float]:
    """Names, rank and scale of adapters, which all have the same; see `Adapters`."""
    if not layers:
        return (), 0, 0.0
    layer = next(iter(layers.values()))
    return tuple(layers), layer.r[ADAPTER], layer.scaling[ADAPTER]


def factors_of(layers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and parameters of both factors of every layer; see `Adapters`."""
    for name, layer in layers.items():
        yield f"{name}{DOWN}", layer.lora_A[ADAPTER].weight
        yield f"{name}{UP}", layer.lora_B[ADAPTER].weight
