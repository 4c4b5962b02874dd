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
        rows = [
            Sample("", str(i), tuple(context), tuple(ids), (True,) * len(ids), (0.0,) * len(ids))
            for i, (context, ids) in enumerate(pairs)
        ]
        lengths = [len(context) + len(ids) for context, ids in pairs]
        found = [0.0] * len(pairs)
        for some in microbatches(lengths, range(len(rows)), self.max_batch_tokens):
            batch = collate([rows[i] for i in some], [Scores(0.0, ())] * len(some))
            logprobs = self.policy.logprobs(batch, [range(len(batch))], reference=True)
            means = logprobs.sum(-1) / batch.loss_mask.sum(-1).clamp(min=1)
            for i, mean in zip(some, means.tolist(), strict=True):
                found[i] = mean
        return found


PART = StartPolicy
