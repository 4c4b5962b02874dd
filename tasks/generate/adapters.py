"""Adapters in place of whole weights: what receives them reads the start policy again and adds their products to it.

So a hand-over moves a small part of the policy, and a generator computes with ordinary weights. It needs the folder of
the start policy, which every host has. Nothing is written there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from tasks.generate import Adapters, Shapes, WeightsError
from tasks.model import read_weights

DOWN, UP = "/A", "/B"
"""Ends of the names of a weight's two factors, [rank, in] and [out, rank]."""


def shapes_of(adapters: Adapters, of_policy: Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors, as `checked` expects them.

    Raises:
        WeightsError: an adapted weight is not in the policy.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in adapters.names:
        if name not in of_policy:
            raise WeightsError(f"new adapters: {name} is unknown. Expected weights of the start policy.")
        num_out, num_in = of_policy[name]
        shapes |= {f"{name}{DOWN}": (adapters.rank, num_in), f"{name}{UP}": (num_out, adapters.rank)}
    return shapes


def merged(folder: Path, factors: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy: that of the start policy, plus `scale` times the product of its factors.

    Args:
        folder: of the start policy.
        factors: by name; see `Adapters`.
        scale: of all products.
    """
    for name, tensor in read_weights(folder):
        if f"{name}{DOWN}" not in factors:
            yield name, tensor
            continue
        down, up = factors[f"{name}{DOWN}"].float(), factors[f"{name}{UP}"].float()
        yield name, tensor.float() + scale * (up @ down)
