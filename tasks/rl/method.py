"""A method is a composition: grammar and prompt, sampler, rewards, filter, advantage, loss.

The parts are small objects that know nothing of one another or of the method they serve. A part says
which extra tensors it reads (`needs_values`, `needs_reference`); the loop computes those and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from tasks.agent.grammar import SearchGrammar
from tasks.conf import require
from tasks.rewards import Reward
from tasks.rl import advantages, losses
from tasks.rl.experience import Experience
from tasks.rl.filters import KeepAll
from tasks.rl.losses import Aggregation, Normalizer
from tasks.rl.samplers import IndependentGroup

Tokens = Literal["generated", "response"]


class Advantage(Protocol):
    """Fills `advantages` (and `returns`, for a critic).

    `needs_old_logprobs`: it reads them, so all must exist before the first update; otherwise the first
    mini-batch's are taken from its own update, whose ratio is then exactly 1.
    """

    @property
    def needs_values(self) -> bool:
        """Whether a critic must be trained."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether reference logprobs must be there."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether old logprobs must be there."""
        ...

    def __call__(self, experience: Experience) -> Experience: ...


class Loss(Protocol):
    """The policy's loss of one micro-batch, summing over micro-batches to the mini-batch's exact loss."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference logprobs must be there."""
        ...

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy is part of the loss, not only a metric."""
        ...

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Method:
    """What `tasks/methods/<name>.py` builds and the training loop runs.

    Attributes:
        template: prompt with `{question}`.
        grammar: text to turns.
        sampler, rewards, filter, advantage, loss: the parts.
        value_loss: the critic's loss where the advantage needs values.
        temperature, top_p: of rollouts.
    """

    template: str
    grammar: SearchGrammar
    sampler: IndependentGroup
    rewards: tuple[Reward, ...]
    filter: KeepAll
    advantage: Advantage
    loss: Loss
    value_loss: ClippedValueLoss | None
    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start policy must be held."""
        return self.advantage.needs_reference or self.loss.needs_reference


@dataclass(frozen=True)
class GroupAdvantage:
    """GRPO: a trajectory's reward, normalised in its group, on all its tokens (search_r1 section 4)."""

    eps: float = 1e-6
    spread: Literal["sample", "population"] = "sample"
    needs_values: bool = False
    needs_reference: bool = False
    needs_old_logprobs: bool = False

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        scores = experience.rewards.sum(-1).double()
        normal = advantages.group_normalized(scores, experience.group_ids, self.eps, self.spread).float()
        return replace(experience, advantages=normal[:, None] * experience.loss_mask)


@dataclass(frozen=True)
class TokenGae:
    """PPO: token rewards minus a k1 KL penalty, GAE with a critic, whitened (search_r1 sections 4 and 5).

    Attributes:
        gamma, lam: discount and trace decay.
        kl_coefficient: weight of k1 = old - ref in the token reward; 0 needs no reference.
        whiten_over: tokens that give the whitening statistics; `response` (observations included) is as released.
    """

    gamma: float
    lam: float
    kl_coefficient: float
    whiten_over: Tokens = "generated"
    needs_values: bool = True

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
        rewards = experience.rewards
        if self.kl_coefficient:
            assert experience.ref_logprobs is not None
            assert experience.old_logprobs is not None
            penalty = losses.k1(experience.old_logprobs, experience.ref_logprobs, experience.loss_mask)
            rewards = rewards - self.kl_coefficient * penalty
        raw, returns = advantages.gae(
            rewards, experience.values * experience.response_mask, experience.loss_mask, self.gamma, self.lam
        )
        over = experience.loss_mask if self.whiten_over == "generated" else experience.response_mask
        return replace(experience, advantages=advantages.whiten(raw, over), returns=returns)


@dataclass(frozen=True)
class TokenClip:
    """Clipped token-level policy loss with optional k3 KL and entropy terms (search_r1 section 5).

    Attributes:
        clip_low, clip_high: distances from 1.
        aggregation: over tokens or over trajectories.
        kl_coefficient: weight of k3 in the loss; 0 needs no reference.
        entropy_coefficient: weight of the entropy bonus; 0.001 as released.
        importance_cap: cap of the generator-trainer importance weight; null switches it off.
    """

    clip_low: float
    clip_high: float
    aggregation: Aggregation = "token_mean"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    importance_cap: float | None = 2.0

    def __post_init__(self) -> None:
        require(0 <= self.clip_low < 1, "clip_low", self.clip_low, "a distance from 1 in [0, 1), such as 0.2")
        require(self.clip_high >= 0, "clip_high", self.clip_high, "a distance from 1, such as 0.2")
        require(self.kl_coefficient >= 0, "kl_coefficient", self.kl_coefficient, "0 or more")
        cap = self.importance_cap
        require(cap is None or cap >= 1, "importance_cap", cap, "null or at least 1")

    @property
    def needs_reference(self) -> bool:
        """Only with a KL term."""
        return self.kl_coefficient > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """Only with an entropy bonus."""
        return self.entropy_coefficient > 0

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of one micro-batch; `logprobs`, `entropy`: [B, T].

        `approx_kl` is the k3 distance from the policy that played, `kl` that from the reference.
        """
        assert batch.old_logprobs is not None
        assert batch.advantages is not None
        mask, old = batch.loss_mask, batch.old_logprobs
        ratio = losses.ratios(logprobs, old, mask)
        weight = losses.importance_weights(old, batch.sampler_logprobs, mask, self.importance_cap)
        per_token = weight * losses.clipped(ratio, batch.advantages, self.clip_low, self.clip_high)
        loss = losses.aggregate(per_token, mask, self.aggregation, normalizer)
        if self.kl_coefficient:
            assert batch.ref_logprobs is not None
            penalty = losses.k3(logprobs, batch.ref_logprobs, mask)
            loss = loss + self.kl_coefficient * losses.aggregate(penalty, mask, self.aggregation, normalizer)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * losses.aggregate(entropy, mask, self.aggregation, normalizer)
        with torch.no_grad():
            share = mask.sum() / max(normalizer.tokens, 1)
            clip = losses.clip_fraction(ratio, batch.advantages, mask, self.clip_low, self.clip_high)
            metrics = {
                "loss": loss.detach(),
                "clip_fraction": clip * share,
                "ratio_mean": losses.aggregate(ratio, mask, "token_mean", normalizer),
                "entropy": losses.aggregate(entropy.detach(), mask, "token_mean", normalizer),
                "approx_kl": losses.aggregate(losses.k3(old, logprobs, mask), mask, "token_mean", normalizer),
            }
            if batch.ref_logprobs is not None:
                distance = losses.k3(logprobs, batch.ref_logprobs, mask)
                metrics["kl"] = losses.aggregate(distance, mask, "token_mean", normalizer)
        return loss, metrics


@dataclass(frozen=True)
class ClippedValueLoss:
    """The critic's loss (search_r1 section 5).

    Attributes:
        clip: distance a value may move from its old one.
        over: tokens that count; `response` (observations included) is as released.
    """

    clip: float
    over: Tokens = "generated"

    def __post_init__(self) -> None:
        require(self.clip > 0, "value_clip", self.clip, "a positive distance, such as 0.5")

    def mask(self, batch: Experience) -> Tensor:
        """[B, T] tokens that count."""
        return batch.loss_mask if self.over == "generated" else batch.response_mask

    def __call__(self, batch: Experience, values: Tensor, normalizer: Normalizer) -> Tensor:
        """Mean over the mini-batch's tokens; `values` [B, T]; `normalizer` is of this loss's mask."""
        assert batch.values is not None
        assert batch.returns is not None
        per_token = losses.value_loss(values, batch.values, batch.returns, self.clip)
        return losses.aggregate(per_token, self.mask(batch), "token_mean", normalizer)


def outcome_parts(names: Sequence[str], scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the named reward parts over trajectories that have them."""
    found = {name: [s[name] for s in scores if name in s] for name in names}
    return {f"{name}_mean": sum(v) / len(v) for name, v in found.items() if v}
