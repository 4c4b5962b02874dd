"""Log-probabilities under the policy that training starts from, computed by the engine's frozen reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tasks.engine import Policy
from tasks.records.usage import Usage
from tasks.rl.experience import collate, microbatches
from tasks.services import Pair, Resources, Role
from tasks.types import Sample, Scores


@dataclass(frozen=True)
class StartPolicy:
    """The run's own engine answers; there is nothing to set."""

    role: ClassVar[Role] = "log_probs"
    needs_reference: ClassVar[bool] = True

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ReferenceLogProbs]:
        """Starts and closes nothing, because the engine belongs to the run."""
        assert resources.policy is not None
        yield ReferenceLogProbs(resources.policy, resources.tokenizer, resources.max_batch_tokens)


@dataclass(frozen=True)
class ReferenceLogProbs:
    """See `tasks.services.LogProbs`.

    Attributes:
        policy: whose frozen reference computes the log-probabilities.
        tokenizer: the policy's.
        max_batch_tokens: tokens of one forward, padding included.
        usage: pairs are its calls.
    """

    policy: Policy
    tokenizer: Any
    max_batch_tokens: int
    usage: Usage = field(default_factory=Usage)

    def encode(self, text: str) -> list[int]:
        """See `LogProbs`."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        """See `LogProbs`; pairs of similar length share a micro-batch."""
        if not pairs:
            return []
        with self.usage.waiting(len(pairs), sum(len(context) + len(ids) for context, ids in pairs)):
            return self._means(pairs)

    def _means(self, pairs: Sequence[Pair]) -> list[float]:
        samples = [
            Sample("", str(i), tuple(context), tuple(ids), (True,) * len(ids), (0.0,) * len(ids))
            for i, (context, ids) in enumerate(pairs)
        ]
        experience = collate(samples, [Scores(0.0, ())] * len(samples))
        plan = microbatches(experience.lengths.tolist(), range(len(samples)), self.max_batch_tokens)
        logprobs = self.policy.logprobs(experience, plan, reference=True)

        means = [0.0] * len(samples)
        for rows in plan:
            # The sum over a wider tensor would add in another order and round differently.
            width = int(experience.lengths[rows].max())
            counts = experience.loss_mask[rows].sum(-1).clamp(min=1)
            for row, mean in zip(rows, (logprobs[rows, :width].sum(-1) / counts).tolist(), strict=True):
                means[row] = mean
        return means


PART = StartPolicy
