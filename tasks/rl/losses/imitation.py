"""Supervised fine-tuning on the trajectories that were kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tasks.rl.experience import Experience
from tasks.rl.losses import Aggregation, Normalizer, aggregate


@dataclass(frozen=True)
class Imitation:
    """Negative log-likelihood of the generated tokens, weighted by their advantage.

    InstructGPT Section 3.5 (arXiv 2203.02155; docs/methods/sft.md)

    `aggregation`: over tokens or over trajectories.
    """

    aggregation: Aggregation = "token_mean"
    needs_reference: ClassVar[bool] = False
    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossTerm`."""
        assert batch.advantages is not None
        return aggregate(-logprobs * batch.advantages, batch.loss_mask, self.aggregation, normalizer, batch.weights), {}


PART = Imitation
