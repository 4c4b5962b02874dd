"""How much better than expected: token GAE, whitening, normalisation inside a group. Arithmetic only.

Shapes: B sequences, T response tokens, N trajectories. Sources: search_r1 section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of each response.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  V after the last token = 0.
    Observation tokens inside a response are time steps like any other (as in the released code); padding
    after the last generated token is not: rewards and values there are taken as 0.

    Args:
        rewards: [B, T], 0 where nothing was given.
        values: [B, T], the critic's estimate before each token.
        loss_mask: [B, T] bool, True on tokens the policy wrote.
        gamma: discount, lam: trace decay; both in [0, 1].

    Returns:
        advantages [B, T] and value targets [B, T] (advantage + value), 0 after the last generated token.

    >>> A, R = gae(torch.tensor([[0., 1.]]), torch.tensor([[.5, .25]]), torch.tensor([[True, True]]), 1.0, 1.0)
    >>> A
    tensor([[0.5000, 0.7500]])
    """
    alive = loss_mask.flip(-1).cumsum(-1).flip(-1) > 0
    # where, not *: rubbish in the padding may be nan, and nan * 0 is still nan.
    rewards, values = torch.where(alive, rewards, 0.0), torch.where(alive, values, 0.0)
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    following = torch.zeros_like(running)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = delta + gamma * lam * running
        advantages[:, t] = running
        following = values[:, t]
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) with statistics of the masked-in tokens, unbiased variance.

    Args:
        advantages: [B, T].
        mask: [B, T] bool, the tokens that give the statistics (recommended: the generated ones).

    Returns:
        [B, T], 0 outside the mask. Fewer than two tokens in the mask: centred only.
    """
    chosen = advantages[mask]
    if chosen.numel() == 0:
        return torch.zeros_like(advantages)
    var = chosen.var(unbiased=True) if chosen.numel() > 1 else torch.zeros_like(chosen[0]) + 1.0
    return torch.where(mask, (advantages - chosen.mean()) * torch.rsqrt(var + 1e-8), torch.zeros_like(advantages))


def group_normalized(
    scores: Tensor, group_ids: Sequence[str], eps: float = 1e-6, spread: Literal["sample", "population"] = "sample"
) -> Tensor:
    """(score - group mean) / (group std + eps); a group of one keeps its score; equal scores give exactly 0.

    Args:
        scores: [N], one per trajectory.
        group_ids: N globally unique prompt ids.
        eps: added to the standard deviation.
        spread: std with n-1 (`sample`: Search-R1, R-Search, DSPO) or n (`population`: SLATE) in the denominator.

    Returns:
        [N] advantages.

    >>> group_normalized(torch.tensor([1., 0.]), ["q", "q"])
    tensor([ 0.7071, -0.7071])
    """
    if len(group_ids) != len(scores):
        raise ValueError(f"{len(scores)} scores but {len(group_ids)} group ids: expected one id per score.")
    members: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    result = torch.empty_like(scores)
    for rows in members.values():
        own = scores[rows]
        if len(rows) == 1:
            result[rows] = own
        elif bool((own == own[0]).all()):
            result[rows] = torch.zeros_like(own)  # A mean of equal floats can differ from them by one ulp.
        else:
            result[rows] = (own - own.mean()) / (own.std(unbiased=spread == "sample") + eps)
    return result
