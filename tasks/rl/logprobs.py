"""Arithmetic on two log-probabilities of the same tokens: ratios, importance weights and KL estimates.

Shapes: B sequences, T response tokens. Observation tokens are masked before any exponential: padding gives inf, and
inf * 0 is nan.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratios(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] exp(logprobs - old_logprobs) on generated tokens, 1 elsewhere; exactly 1 where the policy has not moved.

    PPO Eq. 6 (arXiv 1707.06347; docs/methods/ppo.md)

    A difference above 60 counts as 60: float32 overflows at 89, and the gradient of a clipped inf is nan.
    """
    return torch.where(loss_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).clamp(max=60).exp()


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B] geometric mean of a trajectory's token ratios, over generated tokens alone.

    GSPO Eq. 7 (arXiv 2507.18071; docs/methods/dspo.md)
    DSPO Eq. 6 (arXiv 2510.09255; docs/methods/dspo.md)

    Exactly 1 where the policy has not moved, and for a trajectory without a generated token, which has no ratio.

    >>> logp, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -2.4]])
    >>> sequence_ratios(logp, old, torch.tensor([[True, True]]))
    tensor([1.3499])
    """
    difference = torch.where(loss_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).sum(-1)
    return (difference / loss_mask.sum(-1).clamp(min=1)).clamp(max=60).exp()


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, cap: float | None) -> Tensor:
    """[B, T] min(exp(old - sampler), cap), no gradient: corrects for a generator that is not exactly the trainer.

    Truncated importance sampling: tokens were drawn by the generator's probabilities, the loss takes its
    expectation under the trainer's old ones. 1 off the mask, and everywhere when `cap` is None (switched off).
    IMPALA Section 4.1 (arXiv 1802.01561; docs/methods/ppo.md)
    """
    if cap is None:
        return torch.ones_like(old_logprobs)
    return ratios(old_logprobs, sampler_logprobs, loss_mask).clamp(max=cap).detach()


def k1(old_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] old - ref on generated tokens, 0 elsewhere: the KL estimate PPO subtracts from token rewards.

    GRPO Eq. 2 (arXiv 2402.03300; docs/methods/grpo.md)
    """
    return torch.where(loss_mask, old_logprobs - ref_logprobs, torch.zeros_like(old_logprobs))


def k3(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] exp(d) - d - 1 with d = ref - logprobs, clamped to [-10, 10], 0 off the mask: GRPO's KL term.

    GRPO Eq. 4 (arXiv 2402.03300; docs/methods/grpo.md)
    """
    difference = torch.where(loss_mask, ref_logprobs - logprobs, torch.zeros_like(logprobs))
    # Beyond 20 the term is clamped to 10 anyway; without this limit exp gives inf and its gradient nan.
    difference = difference.clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(-10, 10)
