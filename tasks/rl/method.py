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
from tasks.rewards import Need, Reward
from tasks.rl import advantages, losses
from tasks.rl.experience import Experience
from tasks.rl.filters import Filter
from tasks.rl.losses import Aggregation, Normalizer
from tasks.rl.samplers import Sampler
from tasks.rl.simulators import Simulator

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
        simulator: answers searches during training in place of the search engine; None: the engine does.
    """

    template: str
    grammar: SearchGrammar
    sampler: Sampler
    rewards: tuple[Reward, ...]
    filter: Filter
    advantage: Advantage
    loss: Loss
    value_loss: ClippedValueLoss | None
    temperature: float
    top_p: float
    simulator: Simulator | None = None

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start policy must be held."""
        return self.advantage.needs_reference or self.loss.needs_reference or "likelihood" in self.needs

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the rewards together need."""
        return tuple(dict.fromkeys(need for reward in self.rewards for need in reward.needs))


@dataclass(frozen=True)
class GroupAdvantage:
    """GRPO: a trajectory's reward, compared with its group's, on all its tokens (search_r1 section 4).

    Attributes:
        eps, spread: see `advantages.group_normalized`.
        leave_one_out: take off the mean of the others and do not divide (RLOO).
    """

    eps: float = 1e-6
    spread: Literal["sample", "population"] = "sample"
    leave_one_out: bool = False
    needs_values: bool = False
    needs_reference: bool = False
    needs_old_logprobs: bool = False

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        scores, groups = experience.rewards.sum(-1).double(), experience.group_ids
        if self.leave_one_out:
            compared = advantages.leave_one_out(scores, groups)
        else:
            compared = advantages.group_normalized(scores, groups, self.eps, self.spread)
        return replace(experience, advantages=compared.float()[:, None] * experience.loss_mask)


@dataclass(frozen=True)
class NoAdvantage:
    """1 on every generated token: for a loss that imitates what was kept."""

    needs_values: bool = False
    needs_reference: bool = False
    needs_old_logprobs: bool = False

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        return replace(experience, advantages=experience.loss_mask.float())


@dataclass(frozen=True)
class TokenGae:
    """PPO: token rewards minus a k1 KL penalty, GAE with a critic, whitened (search_r1 sections 4 and 5).

    Attributes:
        gamma, lam: discount and trace decay.
        kl_coefficient: weight of k1 = old - ref in the token reward; 0 needs no reference.
        whiten_over: tokens that give the whitening statistics; `response` (observations included) is as released.
        per: a time step is a token, or a turn (pica section 4).
    """

    gamma: float
    lam: float
    kl_coefficient: float
    whiten_over: Tokens = "generated"
    per: Literal["token", "turn"] = "token"
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
        estimate = advantages.gae if self.per == "token" else advantages.turn_gae
        raw, returns = estimate(
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
            metrics = _metrics(batch, logprobs, entropy, normalizer)
            metrics |= {"loss": loss.detach(), "clip_fraction": clip * share}
        return loss, metrics


@dataclass(frozen=True)
class SequenceClip:
    """Clipped policy loss with one ratio a trajectory, mean over trajectories (dspo section 6; GSPO).

    The gradient gives every token of a trajectory the same weight; a clipped trajectory loses all its tokens. With
    advantages that differ inside a trajectory their mean counts.

    Attributes:
        clip_low, clip_high: distances from 1; 3e-4 and 4e-4 in GSPO, because the ratio stays very near 1.
        kl_coefficient: weight of k3 in the loss, mean per trajectory first; 0 needs no reference.
        importance_cap: cap of the generator-trainer weight of a trajectory; null switches it off.
    """

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0
    importance_cap: float | None = 2.0
    needs_entropy_gradient: bool = False

    def __post_init__(self) -> None:
        TokenClip(self.clip_low, self.clip_high, "seq_mean", self.kl_coefficient, 0.0, self.importance_cap)  # Bounds.

    @property
    def needs_reference(self) -> bool:
        """Only with a KL term."""
        return self.kl_coefficient > 0

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of one micro-batch; `clip_fraction` is a share of trajectories."""
        assert batch.old_logprobs is not None
        assert batch.advantages is not None
        mask, old = batch.loss_mask, batch.old_logprobs
        advantage = (batch.advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)  # [B]
        ratio = losses.sequence_ratios(logprobs, old, mask)  # [B]
        unclipped, chosen = -advantage * ratio, losses.clipped(ratio, advantage, self.clip_low, self.clip_high)
        weight = torch.ones_like(ratio)
        if self.importance_cap is not None:
            weight = losses.sequence_ratios(old, batch.sampler_logprobs, mask).clamp(max=self.importance_cap).detach()
        loss = (weight * chosen).sum() / max(normalizer.sequences, 1)
        if self.kl_coefficient:
            assert batch.ref_logprobs is not None
            penalty = losses.k3(logprobs, batch.ref_logprobs, mask)
            loss = loss + self.kl_coefficient * losses.aggregate(penalty, mask, "seq_mean", normalizer)
        with torch.no_grad():
            clip = (chosen > unclipped).sum() / max(normalizer.sequences, 1)
            metrics = _metrics(batch, logprobs, entropy, normalizer)
            metrics |= {"loss": loss.detach(), "clip_fraction": clip}
        return loss, metrics


@dataclass(frozen=True)
class Imitation:
    """Negative log-likelihood of the generated tokens, weighted by their advantage: supervised fine-tuning.

    `aggregation`: over tokens or over trajectories.
    """

    aggregation: Aggregation = "token_mean"
    needs_reference: bool = False
    needs_entropy_gradient: bool = False

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of one micro-batch."""
        assert batch.advantages is not None
        loss = losses.aggregate(-logprobs * batch.advantages, batch.loss_mask, self.aggregation, normalizer)
        with torch.no_grad():
            metrics = _metrics(batch, logprobs, entropy, normalizer) | {"loss": loss.detach()}
        return loss, metrics


def _metrics(batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer) -> dict[str, Tensor]:
    """What every policy loss reports: token means of ratio, entropy and distances."""
    assert batch.old_logprobs is not None
    mask, old = batch.loss_mask, batch.old_logprobs

    def mean(per_token: Tensor) -> Tensor:
        return losses.aggregate(per_token, mask, "token_mean", normalizer)

    found = {
        "ratio_mean": mean(losses.ratios(logprobs, old, mask)),
        "entropy": mean(entropy.detach()),
        "approx_kl": mean(losses.k3(old, logprobs, mask)),
    }
    if batch.ref_logprobs is not None:
        found["kl"] = mean(losses.k3(logprobs, batch.ref_logprobs, mask))
    return found


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
