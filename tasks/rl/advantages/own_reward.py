"""A sample's own reward as its advantage (REINFORCE): nothing is compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tasks.rl.experience import Experience


@dataclass(frozen=True)
class OwnReward:
    """The sum of a sample's rewards on all its generated tokens, for groups of one.

    SLATE Table 3 (arXiv 2602.23440; docs/methods/slate.md), the row k = 1
    """

    needs_values: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        return replace(experience, advantages=experience.rewards.sum(-1)[:, None] * experience.loss_mask)


PART = OwnReward
