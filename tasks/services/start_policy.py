"""Log-probabilities under the policy that training starts from: the engine's frozen reference answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.engine import Policy
from tasks.rl.experience import collate, microbatches
from tasks.services import Pair, Resources, Role
from tasks.types import Sample, Scores


@dataclass(frozen=True)
class StartPolicy:
    """It has no setting: the run's own engine answers."""

    role: ClassVar[Role] = "log_probs"
    needs_reference: ClassVar[bool] = True

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ReferenceLogProbs]:
        """Nothing is started and nothing is closed: the engine belongs to the run."""
        assert resources.policy is not None
        yield ReferenceLogProbs(resources.policy, resources.tokenizer, resources.max_batch_tokens)


@dataclass(frozen=True)
class ReferenceLogProbs:
    """See `tasks.services.LogProbs`.

    Attributes:
        policy: its frozen reference is asked.
        tokenizer: the policy's.
        max_batch_tokens: tokens of one forward, padding included.
    """

    policy: Policy
    tokenizer: Any
    max_batch_tokens: int

    def encode(self, text: str) -> list[int]:
        """See `LogProbs`."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        """See `LogProbs`; in micro-batches of pairs of similar length."""
        if not pairs:
            return []
        samples = [
            Sample("", str(i), tuple(context), tuple(ids), (True,) * len(ids), (0.0,) * len(ids))
            for i, (context, ids) in enumerate(pairs)
        ]
        experience = collate(samples, [Scores(0.0, ())] * len(samples))
        plan = microbatches(experience.lengths.tolist(), range(len(samples)), self.max_batch_tokens)
        logprobs = self.policy.logprobs(experience, plan, reference=True)

        means = [0.0] * len(samples)
        for rows in plan:
            # A wider tensor would be added up in another order, and rounding would differ.
            width = int(experience.lengths[rows].max())
            counts = experience.loss_mask[rows].sum(-1).clamp(min=1)
            for row, mean in zip(rows, (logprobs[rows, :width].sum(-1) / counts).tolist(), strict=True):
                means[row] = mean
        return means


PART = StartPolicy
