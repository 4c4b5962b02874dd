"""The policy's loss: a sum of terms, one file for each kind of term.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.logprobs import k3, ratios

Aggregation = Literal["token_mean", "seq_mean"]


@dataclass(frozen=True)
class Normalizer:
    """The denominators of a whole mini-batch, so that micro-batches add up to its exact loss.

    Attributes:
        tokens: trained tokens of the mini-batch.
        sequences: samples of the mini-batch with at least one trained token.
    """

    tokens: int
    sequences: int

    @staticmethod
    def of(loss_mask: Tensor) -> Normalizer:
        """Of a mini-batch's loss_mask [B, T]."""
        per_row = loss_mask.sum(-1)
        return Normalizer(int(per_row.sum()), int((per_row > 0).sum()))


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    how: Aggregation,
    normalizer: Normalizer | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean of a per-token quantity over trained tokens.

    `token_mean`: one mean over all trained tokens. `seq_mean`: mean of the samples' own means, as
    the papers print it. All-zero masks give 0, not nan.

    Args:
        per_token: [B, T].
        loss_mask: [B, T] bool.
        how: see above.
        normalizer: of the mini-batch this micro-batch belongs to; None: this batch is all of it.
        weights: [B] factor of each sample's share of the sum; the denominator does not change. None: all are 1.

    Returns:
        scalar.
    """
    total = normalizer or Normalizer.of(loss_mask)
    kept = torch.where(loss_mask, per_token, torch.zeros_like(per_token))
    if weights is not None:
        kept = kept * weights[:, None]
    if how == "token_mean":
        return kept.sum() / max(total.tokens, 1)
    return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum() / max(total.sequences, 1)


class LossTerm(Protocol):
    """A term of the loss of one micro-batch; its values over the micro-batches add up to the mini-batch's."""

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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term, a scalar, and metric sums of its own; `logprobs`, `entropy`: [B, T]."""
        ...


@dataclass(frozen=True)
class LossSum:
    """The terms, added up in order."""

    terms: tuple[LossTerm, ...]

    def __post_init__(self) -> None:
        require(bool(self.terms), "losses", {}, "at least one term")

    @property
    def needs_reference(self) -> bool:
        """Whether a term does."""
        return any(term.needs_reference for term in self.terms)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether a term does."""
        return any(term.needs_entropy_gradient for term in self.terms)

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of one micro-batch; `logprobs`, `entropy`: [B, T]."""
        (loss, metrics), *others = (term(batch, logprobs, entropy, normalizer) for term in self.terms)
        for value, more in others:
            loss, metrics = loss + value, metrics | more

        with torch.no_grad():
            return loss, _metrics(batch, logprobs, entropy, normalizer) | metrics | {"loss": loss.detach()}


def _metrics(batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer) -> dict[str, Tensor]:
    """Token means of ratio, entropy and distances, whatever the terms are.

    `approx_kl` is the k3 distance from the policy that played, `kl` that from the reference.
    """
    assert batch.old_logprobs is not None
    mask, old = batch.loss_mask, batch.old_logprobs

    def mean(per_token: Tensor) -> Tensor:
        return aggregate(per_token, mask, "token_mean", normalizer)

    metrics = {
        "ratio_mean": mean(ratios(logprobs, old, mask)),
        "entropy": mean(entropy.detach()),
        "approx_kl": mean(k3(old, logprobs, mask)),
    }
    if batch.ref_logprobs is not None:
        metrics["kl"] = mean(k3(logprobs, batch.ref_logprobs, mask))
    return metrics
