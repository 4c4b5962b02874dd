"""Every kept trajectory has the same advantage; nothing is compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tasks.rl.experience import Experience


@dataclass(frozen=True)
class ConstantAdvantage:
    """1 on every generated token: for a loss that imitates what was kept.

    InstructGPT Section 3.5 (arXiv 2203.02155; docs/methods/sft.md)
    """

    needs_values: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        return replace(experience, advantages=experience.loss_mask.float())


PART = ConstantAdvantage
