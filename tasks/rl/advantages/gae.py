"""PPO's advantage: generalised advantage estimation with a critic, over tokens or turns, whitened or as it is.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.logprobs import k1


def gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of each response.

    GAE Eq. 16 (arXiv 1506.02438; docs/methods/ppo.md)

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
    alive = loss_mask.flip(-1).cumsum(-1).flip(-1) > 0  # True up to the last generated token of each row.
    # torch.where instead of a product: padding may hold nan, and nan * 0 is still nan.
    rewards = torch.where(alive, rewards, 0.0)
    values = torch.where(alive, values, 0.0)

    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(advantage)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) with statistics of the masked-in tokens, unbiased variance.

    Search-R1 torch_functional.py:130 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/ppo.md)

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


def turn_gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE whose time steps are turns: one advantage a turn, given to each of its generated tokens.

    PiCA Eq. 13 (arXiv 2605.09287; docs/methods/pica.md)

    A turn is a run of generated tokens; R_t is the sum of rewards from its first token up to the next turn, V(s_t) the
    value at its first token (PiCA has V of the last token before it, which is the estimate before this one).

    Args and returns as `gae`; both results are 0 off the loss mask.

    >>> A, _ = turn_gae(torch.tensor([[0., .1, 0., 1.]]), torch.tensor([[.3, 9., 9., .5]]),
    ...                 torch.tensor([[True, True, False, True]]), 1.0, 1.0)
    >>> A
    tensor([[0.8000, 0.8000, 0.0000, 0.5000]])
    """
    before = torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    starts = loss_mask & ~before
    numbers = starts.cumsum(-1)  # [B, T] number of the turn, 1 from the first turn on; 0 before it
    num_turns = max(int(numbers.max()), 1) if numbers.numel() else 1  # Avoid a zero-width tensor.
    alive = loss_mask.flip(-1).cumsum(-1).flip(-1) > 0

    # [B, turns]; column 0 collects what lies before the first turn and is cut off.
    shape = (len(rewards), num_turns + 1)
    per_turn = rewards.new_zeros(shape).scatter_add_(1, numbers, torch.where(alive, rewards, 0.0))[:, 1:]
    baseline = values.new_zeros(shape).scatter_add_(1, numbers, torch.where(starts, values, 0.0))[:, 1:]
    exists = torch.arange(1, num_turns + 1, device=rewards.device) <= numbers.max(-1, keepdim=True).values
    advantages, returns = gae(per_turn, baseline, exists, gamma, lam)

    on_tokens = [torch.nn.functional.pad(of_turn, (1, 0)).gather(1, numbers) for of_turn in (advantages, returns)]
    return torch.where(loss_mask, on_tokens[0], 0.0), torch.where(loss_mask, on_tokens[1], 0.0)


@dataclass(frozen=True)
class TokenGae:
    """Token rewards minus a k1 KL penalty, then GAE with a critic: over tokens and whitened (Search-R1), or over turns.

    GRPO Eq. 2 (arXiv 2402.03300; docs/methods/grpo.md)

    Attributes:
        gamma, lam: discount and trace decay.
        kl_coefficient: weight of k1 = old - ref in the token reward; 0 needs no reference.
        whiten_over: tokens that give the whitening statistics; `response` (observations included) is as released.
            `none` trains the estimate itself, as PiCA's Eq. 13 has it.
        per: a time step is a token, or a turn.
    """

    gamma: float
    lam: float
    kl_coefficient: float
    whiten_over: Literal["generated", "response", "none"] = "generated"
    per: Literal["token", "turn"] = "token"
    needs_values: ClassVar[bool] = True
    compares_group: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "a number in [0, 1]")
        require(0 <= self.lam <= 1, "lam", self.lam, "a number in [0, 1]")
        require(self.kl_coefficient >= 0, "kl_coefficient", self.kl_coefficient, "0 or more")

    @property
    def needs_reference(self) -> bool:
        """Only with a KL penalty."""
        return self.kl_coefficient > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Only with a KL penalty."""
        return self.kl_coefficient > 0

    def __call__(self, experience: Experience) -> Experience:
        """Advantages and returns [N, T]."""
        assert experience.values is not None
        rewards, mask = experience.rewards, experience.loss_mask
        if self.kl_coefficient:
            assert experience.ref_logprobs is not None
            assert experience.old_logprobs is not None
            rewards = rewards - self.kl_coefficient * k1(experience.old_logprobs, experience.ref_logprobs, mask)

        estimate = gae if self.per == "token" else turn_gae
        raw, returns = estimate(rewards, experience.values * experience.response_mask, mask, self.gamma, self.lam)

        if self.whiten_over == "none":
            return replace(experience, advantages=torch.where(mask, raw, 0.0), returns=returns)
        over = mask if self.whiten_over == "generated" else experience.response_mask
        return replace(experience, advantages=whiten(raw, over), returns=returns)


PART = TokenGae
