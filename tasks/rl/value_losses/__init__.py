"""The critic's loss, one file for each kind."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tasks.rl.experience import Experience
from tasks.rl.losses import Normalizer


class ValueLoss(Protocol):
    """The critic's loss of one micro-batch; over the micro-batches its values add up to that of the mini-batch."""

    def mask(self, batch: Experience) -> Tensor:
        """[B, T] tokens that count."""
        ...

    def __call__(self, batch: Experience, values: Tensor, normalizer: Normalizer) -> Tensor:
        """A scalar; `values` is [B, T], `normalizer` has the counts of this loss's mask."""
        ...
