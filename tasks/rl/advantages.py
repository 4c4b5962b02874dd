"""How much better than expected: GAE over tokens or turns, whitening, comparison inside a group. Arithmetic only.

Shapes: B sequences, T response tokens, N trajectories. Sources: search_r1 section 4, dspo section 5, pica section 4.
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
    result = torch.empty_like(scores)
    for rows in _members(scores, group_ids):
        own = scores[rows]
        if len(rows) == 1:
            result[rows] = own
        elif bool((own == own[0]).all()):
            result[rows] = torch.zeros_like(own)  # A mean of equal floats can differ from them by one ulp.
        else:
            result[rows] = (own - own.mean()) / (own.std(unbiased=spread == "sample") + eps)
    return result


def leave_one_out(scores: Tensor, group_ids: Sequence[str]) -> Tensor:
    """score - mean of the group's other scores (RLOO); a group of one keeps its score.

    Args and returns as `group_normalized`.

    >>> leave_one_out(torch.tensor([1., 0., 0.]), ["q", "q", "q"])
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    result = torch.empty_like(scores)
    for rows in _members(scores, group_ids):
        own = scores[rows]
        result[rows] = own if len(rows) == 1 else (own - own.mean()) * (len(rows) / (len(rows) - 1))
    return result


def _members(scores: Tensor, group_ids: Sequence[str]) -> list[list[int]]:
    """Rows of each group."""
    if len(group_ids) != len(scores):
        raise ValueError(f"{len(scores)} scores but {len(group_ids)} group ids: expected one id per score.")
    members: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    return list(members.values())


def turn_gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE whose time steps are turns: one advantage a turn, given to each of its generated tokens.

    A turn is a run of generated tokens; R_t is the sum of rewards from its first token up to the next turn, V(s_t) the
    value at its first token (pica section 4: V of the last token before it, which is the estimate before this one).

    Args and returns as `gae`; both results are 0 off the loss mask.

    >>> A, _ = turn_gae(torch.tensor([[0., .1, 0., 1.]]), torch.tensor([[.3, 9., 9., .5]]),
    ...                 torch.tensor([[True, True, False, True]]), 1.0, 1.0)
    >>> A
    tensor([[0.8000, 0.8000, 0.0000, 0.5000]])
    """
    before = torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    starts = loss_mask & ~before
    numbers = starts.cumsum(-1)  # [B, T], 1 from the first turn on
    num_turns = max(int(numbers.max()), 1) if numbers.numel() else 1  # At least one column, perhaps of nobody.
    alive = loss_mask.flip(-1).cumsum(-1).flip(-1) > 0
    shape = (len(rewards), num_turns + 1)
    per_turn = rewards.new_zeros(shape).scatter_add_(1, numbers, torch.where(alive, rewards, 0.0))[:, 1:]
    baseline = values.new_zeros(shape).scatter_add_(1, numbers, torch.where(starts, values, 0.0))[:, 1:]
    exists = torch.arange(1, num_turns + 1, device=rewards.device) <= numbers.max(-1, keepdim=True).values
    advantages, returns = gae(per_turn, baseline, exists, gamma, lam)
    spread = [torch.nn.functional.pad(one, (1, 0)).gather(1, numbers) for one in (advantages, returns)]
    return torch.where(loss_mask, spread[0], 0.0), torch.where(loss_mask, spread[1], 0.0)
