"""The clipped policy loss, with one importance ratio a token (PPO, GRPO, DAPO) or a trajectory (GSPO, DSPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.logprobs import importance_weights, ratios, sequence_ratios
from tasks.rl.losses import Aggregation, Normalizer, aggregate


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Loss max(-A r, -A clip(r, 1 - low, 1 + high)), of each token or trajectory; shaped like them."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def clip_fraction(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, low: float, high: float) -> Tensor:
    """Share of generated tokens whose clipped branch is active (no gradient flows)."""
    active = clipped(ratio, advantages, low, high) > -advantages * ratio
    return (active & loss_mask).sum() / loss_mask.sum().clamp(min=1)


@dataclass(frozen=True)
class PolicyClip:
    """Clipped policy loss.

    One ratio a token: PPO Eq. 7 (arXiv 1707.06347; docs/methods/ppo.md),
    DAPO Eq. 8 (arXiv 2503.14476; docs/methods/dspo.md), SLATE Eq. 7 (arXiv 2602.23440; docs/methods/slate.md)
    One ratio a trajectory: GSPO Eq. 5 (arXiv 2507.18071; docs/methods/dspo.md),
    DSPO Eq. 11 (arXiv 2510.09255; docs/methods/dspo.md)

    With one ratio a trajectory the gradient gives every token of a trajectory the same weight, and a clipped trajectory
    loses all its tokens. With advantages that differ inside a trajectory their mean counts.

    Attributes:
        low, high: distances from 1, such as 0.2. A trajectory's ratio stays very near 1: GSPO has 3e-4 and 4e-4.
        ratio: of a token, or of a sequence, which is the geometric mean of its tokens' ratios.
        aggregation: of tokens; with one ratio a sequence it must be `seq_mean`.
        importance_cap: cap of the generator-trainer importance weight of a token or a sequence; null switches it off.
    """

    low: float
    high: float
    ratio: Literal["token", "sequence"] = "token"
    aggregation: Aggregation = "token_mean"
    importance_cap: float | None = 2.0
    needs_reference: ClassVar[bool] = False
    needs_entropy_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        cap = self.importance_cap
        fits = self.ratio == "token" or self.aggregation == "seq_mean"
        require(0 <= self.low < 1, "low", self.low, "a distance from 1 in [0, 1), such as 0.2")
        require(self.high >= 0, "high", self.high, "a distance from 1, such as 0.2")
        require(cap is None or cap >= 1, "importance_cap", cap, "null or at least 1")
        require(fits, "aggregation", self.aggregation, "seq_mean with ratio: sequence")

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossTerm`; `clip_fraction` is a share of the ratios, of tokens or of trajectories."""
        return (self._by_token if self.ratio == "token" else self._by_sequence)(batch, logprobs, normalizer)

    def _by_token(
        self, batch: Experience, logprobs: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.old_logprobs is not None
        assert batch.advantages is not None
        mask, old = batch.loss_mask, batch.old_logprobs
        ratio = ratios(logprobs, old, mask)  # [B, T]
        weight = importance_weights(old, batch.sampler_logprobs, mask, self.importance_cap)
        per_token = weight * clipped(ratio, batch.advantages, self.low, self.high)

        with torch.no_grad():
            share = mask.sum() / max(normalizer.tokens, 1)
            fraction = clip_fraction(ratio, batch.advantages, mask, self.low, self.high) * share
        return aggregate(per_token, mask, self.aggregation, normalizer, batch.weights), {"clip_fraction": fraction}

    def _by_sequence(
        self, batch: Experience, logprobs: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.old_logprobs is not None
        assert batch.advantages is not None
        mask, old = batch.loss_mask, batch.old_logprobs

        advantage = (batch.advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)  # [B]
        ratio = sequence_ratios(logprobs, old, mask)  # [B]
        loss = clipped(ratio, advantage, self.low, self.high)

        weight = torch.ones_like(ratio)
        if self.importance_cap is not None:
            weight = sequence_ratios(old, batch.sampler_logprobs, mask).clamp(max=self.importance_cap).detach()
        if batch.weights is not None:
            weight = weight * batch.weights

        num_sequences = max(normalizer.sequences, 1)
        with torch.no_grad():
            fraction = (loss > -advantage * ratio).sum() / num_sequences
        return (weight * loss).sum() / num_sequences, {"clip_fraction": fraction}


PART = PolicyClip
