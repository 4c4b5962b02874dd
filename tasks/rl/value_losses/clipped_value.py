"""PPO's clipped squared error of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import CountedTokens, Experience
from tasks.rl.losses import Normalizer, aggregate


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[B, T] 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    PPO Eq. 9 (arXiv 1707.06347; docs/methods/ppo.md); the clip is the released code's:
    Search-R1 core_algos.py:216 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/ppo.md)
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


@dataclass(frozen=True)
class ClippedValueLoss:
    """Mean over the mini-batch's tokens of `value_loss`.

    Attributes:
        clip: distance a value may move from its old one.
        over: tokens that count; `response` (observations included) is as Search-R1 released it.
    """

    clip: float
    over: CountedTokens = "generated"

    def __post_init__(self) -> None:
        require(self.clip > 0, "clip", self.clip, "a positive distance, such as 0.5")

    def mask(self, batch: Experience) -> Tensor:
        """See `ValueLoss`."""
        return batch.loss_mask if self.over == "generated" else batch.response_mask

    def __call__(self, batch: Experience, values: Tensor, normalizer: Normalizer) -> Tensor:
        """See `ValueLoss`."""
        assert batch.values is not None
        assert batch.returns is not None
        per_token = value_loss(values, batch.values, batch.returns, self.clip)
        return aggregate(per_token, self.mask(batch), "token_mean", normalizer, batch.weights)


PART = ClippedValueLoss
