"""A penalty in the loss on the policy's distance from the start policy (GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience
from tasks.rl.logprobs import k3
from tasks.rl.losses import Aggregation, Normalizer, aggregate


@dataclass(frozen=True)
class ReferenceKl:
    """coefficient * mean of the k3 estimate of KL(policy || reference).

    GRPO Eq. 4 (arXiv 2402.03300; docs/methods/grpo.md)
    DSPO Eq. 5 (arXiv 2510.09255; docs/methods/dspo.md)
    SLATE Algorithm 1 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        coefficient: weight of the term.
        aggregation: over tokens or over trajectories; `question_mean` is the sum over a question's groups of means
            over each group's tokens, once a step of a question (SLATE).
    """

    coefficient: float
    aggregation: Aggregation = "token_mean"
    needs_reference: ClassVar[bool] = True
    needs_entropy_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # A term of weight 0 would still cost a forward pass of the reference.
        require(
            self.coefficient > 0,
            "coefficient",
            self.coefficient,
            "more than 0; write null in place of the term to leave it out",
        )

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossTerm`."""
        assert batch.ref_logprobs is not None
        penalty = k3(logprobs, batch.ref_logprobs, batch.loss_mask)
        by_group = self.aggregation == "question_mean"
        # The tokens of a group are divided by their number, so the weight 1 / k of a candidate would count twice.
        weights, counts = (None, batch.group_tokens) if by_group else (batch.weights, None)
        mean = aggregate(penalty, batch.loss_mask, self.aggregation, normalizer, weights, counts)
        return self.coefficient * mean, {}


PART = ReferenceKl
