"""The hand-over of a policy to its generator, and how much of it went over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from tasks.engine import Policy
from tasks.generate import Generator, Weights


class Handed:
    """Counts what a generator takes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def over(self, policy: Policy, generator: Generator) -> None:
        """Wake the generator and give it the policy's adapters, or all weights of a policy that has none."""
        generator.wake()
        adapters = policy.adapters()
        if adapters is None:
            generator.update_weights(self._counted(policy.weights()))
        else:
            generator.update_weights(replace(adapters, factors=self._counted(adapters.factors)))

    def take(self) -> dict[str, float]:
        """Bytes since the last call, as a metric; none where the generator shares the weights."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        return {"handed_bytes": float(num_bytes)} if num_bytes else {}

    def _counted(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.num_bytes += tensor.nbytes
            yield name, tensor
