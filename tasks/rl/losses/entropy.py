"""A bonus on the policy's entropy, which keeps the policy exploring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.losses import Aggregation, Normalizer, aggregate


@dataclass(frozen=True)
class EntropyBonus:
    """-coefficient * mean entropy.

    PPO Eq. 9 (arXiv 1707.06347; docs/methods/ppo.md)

    Attributes:
        coefficient: weight of the term; Search-R1's released code has 0.001, its paper none.
        aggregation: over tokens or over trajectories.
    """

    coefficient: float
    aggregation: Aggregation = "token_mean"
    needs_reference: ClassVar[bool] = False
    needs_entropy_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # A term of weight 0 would still cost the gradient of the entropy.
        require(
            self.coefficient > 0,
            "coefficient",
            self.coefficient,
            "more than 0; write null in place of the term to leave it out",
        )

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossTerm`."""
        return -(
            self.coefficient * aggregate(entropy, batch.loss_mask, self.aggregation, normalizer, batch.weights)
        ), {}


PART = EntropyBonus
