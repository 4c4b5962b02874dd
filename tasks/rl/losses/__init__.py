"""The policy's loss is a sum of terms, one file for each kind of term.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.logprobs import k3, ratios

Aggregation = Literal["token_mean", "seq_mean", "question_mean"]


@dataclass(frozen=True)
class Normalizer:
    """The denominators of a whole mini-batch: each micro-batch divides by them, so that their losses add up exactly.

    Attributes:
        tokens: trained tokens of the mini-batch.
        sequences: samples of the mini-batch with at least one trained token.
        questions: different questions of the mini-batch; 0 where nobody counted them.
    """

    tokens: int
    sequences: int
    questions: int = 0

    @staticmethod
    def of(loss_mask: Tensor, question_ids: Sequence[str] = ()) -> Normalizer:
        """Of a mini-batch's loss_mask [B, T] and the questions of its samples."""
        per_row = loss_mask.sum(-1)
        return Normalizer(int(per_row.sum()), int((per_row > 0).sum()), len(set(question_ids)))


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    how: Aggregation,
    normalizer: Normalizer | None = None,
    weights: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Mean of a per-token quantity over trained tokens.

    `token_mean` is one mean over all trained tokens. `seq_mean` is the mean of the samples' own means, as the papers
    print it. `question_mean` is the sum of the samples' own means over the number of questions: with weights 1/k, a
    sum over a question's steps of means over their k candidates. A mask without a True gives 0, not nan.

    `token_mean`: DAPO Eq. 12 (arXiv 2503.14476; docs/methods/dspo.md)
    `seq_mean`: GRPO Eq. 3 (arXiv 2402.03300; docs/methods/grpo.md),
    StepSearch Eq. 1 (arXiv 2505.15107; docs/methods/stepsearch.md)
    `question_mean`: SLATE Eq. 7, Algorithm 1 (arXiv 2602.23440; docs/methods/slate.md)

    Args:
        per_token: [B, T].
        loss_mask: [B, T] bool.
        how: see above.
        normalizer: of the mini-batch this micro-batch belongs to; None: this batch is all of it.
        weights: [B] factor of each sample's share of the sum; the denominator does not change. None: all are 1.
        counts: [B] tokens over which `question_mean` takes each sample's mean; None: the sample's own.

    Returns:
        scalar.

    Raises:
        ValueError: `question_mean` of a mini-batch whose questions nobody counted.
    """
    total = normalizer or Normalizer.of(loss_mask)
    kept = torch.where(loss_mask, per_token, torch.zeros_like(per_token))
    if weights is not None:
        kept = kept * weights[:, None]

    if how == "token_mean":
        return kept.sum() / max(total.tokens, 1)
    if how == "question_mean":
        require(total.questions > 0, "aggregation: questions", total.questions, "1 or more, counted in the mini-batch")
        own = loss_mask.sum(-1) if counts is None else counts
        return (kept.sum(-1) / own.clamp(min=1)).sum() / total.questions
    return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum() / max(total.sequences, 1)


class LossTerm(Protocol):
    """A term of the loss of one micro-batch; over the micro-batches its values add up to that of the mini-batch."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference logprobs must be there."""
        ...

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss contains the entropy, so that its gradient is needed; else it is only a metric."""
        ...

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term, a scalar, and its own metrics, which add up over micro-batches; `logprobs`, `entropy`: [B, T]."""
        ...


@dataclass(frozen=True)
class LossSum:
    """The terms, added up in order."""

    terms: tuple[LossTerm, ...]

    def __post_init__(self) -> None:
        require(bool(self.terms), "losses", {}, "at least one term")

    @property
    def needs_reference(self) -> bool:
        """Whether a term needs reference logprobs."""
        return any(term.needs_reference for term in self.terms)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether a term contains the entropy."""
        return any(term.needs_entropy_gradient for term in self.terms)

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch, which add up over micro-batches; `logprobs`, `entropy`: [B, T]."""
        (loss, metrics), *others = (term(batch, logprobs, entropy, normalizer) for term in self.terms)
        for value, more_metrics in others:
            loss = loss + value
            metrics = metrics | more_metrics

        with torch.no_grad():
            return loss, _metrics(batch, logprobs, entropy, normalizer) | metrics | {"loss": loss.detach()}


def _metrics(batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer) -> dict[str, Tensor]:
    """Token means that are reported for every loss: the ratio, the entropy and KL estimates.

    `approx_kl` is the k3 estimate of the distance from the policy that played, `kl` of that from the reference.
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
