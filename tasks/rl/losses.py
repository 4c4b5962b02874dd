"""What is minimised: clipped policy loss, KL terms, value loss and their aggregation. Arithmetic only.

Shapes: B sequences, T response tokens. Sources: search_r1 section 5, dspo section 6. Observation tokens are masked
before any exponential: padding gives inf, and inf * 0 is nan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean"]


@dataclass(frozen=True)
class Normalizer:
    """The denominators of a whole mini-batch, so that micro-batches add up to its exact loss.

    Attributes:
        tokens: generated tokens of the mini-batch.
        sequences: trajectories of the mini-batch with at least one generated token.
    """

    tokens: int
    sequences: int

    @staticmethod
    def of(loss_mask: Tensor) -> Normalizer:
        """Of a mini-batch's loss_mask [B, T]."""
        per_row = loss_mask.sum(-1)
        return Normalizer(int(per_row.sum()), int((per_row > 0).sum()))


def aggregate(per_token: Tensor, loss_mask: Tensor, how: Aggregation, normalizer: Normalizer | None = None) -> Tensor:
    """Mean of a per-token quantity over generated tokens.

    `token_mean`: one mean over all generated tokens. `seq_mean`: mean of the trajectories' own means, as
    the papers print it. All-zero masks give 0, not nan.

    Args:
        per_token: [B, T].
        loss_mask: [B, T] bool.
        how: see above.
        normalizer: of the mini-batch this micro-batch belongs to; None: this batch is all of it.

    Returns:
        scalar.
    """
    total = normalizer or Normalizer.of(loss_mask)
    kept = torch.where(loss_mask, per_token, torch.zeros_like(per_token))
    if how == "token_mean":
        return kept.sum() / max(total.tokens, 1)
    return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum() / max(total.sequences, 1)


def ratios(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] exp(logprobs - old_logprobs) on generated tokens, 1 elsewhere; exactly 1 where the policy has not moved.

    A difference above 60 counts as 60: float32 overflows at 89, and the gradient of a clipped inf is nan.
    """
    return torch.where(loss_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).clamp(max=60).exp()


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B] geometric mean of each trajectory's token ratios, over generated tokens alone (DSPO, GSPO; dspo section 6).

    Exactly 1 where the policy has not moved, and for a trajectory without a generated token, which has no ratio.

    >>> logp, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -2.4]])
    >>> sequence_ratios(logp, old, torch.tensor([[True, True]]))
    tensor([1.3499])
    """
    difference = torch.where(loss_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).sum(-1)
    return (difference / loss_mask.sum(-1).clamp(min=1)).clamp(max=60).exp()


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), of each token or trajectory; shaped like them."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def clip_fraction(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Share of generated tokens whose clipped branch is active (no gradient flows)."""
    active = clipped(ratio, advantages, clip_low, clip_high) > -advantages * ratio
    return (active & loss_mask).sum() / loss_mask.sum().clamp(min=1)


def k1(old_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] old - ref on generated tokens, 0 elsewhere: the KL estimate PPO subtracts from token rewards."""
    return torch.where(loss_mask, old_logprobs - ref_logprobs, torch.zeros_like(old_logprobs))


def k3(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] exp(d) - d - 1 with d = ref - logprobs, clamped to [-10, 10], 0 off the mask: GRPO's KL term."""
    difference = torch.where(loss_mask, ref_logprobs - logprobs, torch.zeros_like(logprobs))
    # Beyond 20 the term is clamped to 10 anyway; without this limit exp gives inf and its gradient nan.
    difference = difference.clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[B, T] 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, cap: float | None) -> Tensor:
    """[B, T] min(exp(old - sampler), cap), no gradient: corrects for a generator that is not exactly the trainer.

    Truncated importance sampling: tokens were drawn by the generator's probabilities, the loss takes its
    expectation under the trainer's old ones. 1 off the mask, and everywhere when `cap` is None (switched off).
    """
    if cap is None:
        return torch.ones_like(old_logprobs)
    return ratios(old_logprobs, sampler_logprobs, loss_mask).clamp(max=cap).detach()
