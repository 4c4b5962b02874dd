"""A trajectory's reward compared with its group's (GRPO). Shapes: N trajectories, T positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience

Deviation = Literal["sample", "population"]


def group_normalized(
    scores: Tensor, group_ids: Sequence[str], eps: float = 1e-6, deviation: Deviation = "sample"
) -> Tensor:
    """(score - group mean) / (group std + eps); equal scores give exactly 0.

    A group of one has nothing to be compared with and keeps its score, as in Search-R1's code.

    GRPO Section 4.1.2 (arXiv 2402.03300; docs/methods/grpo.md)
    DSPO Eq. 10 (arXiv 2510.09255; docs/methods/dspo.md)
    SLATE Eq. 2, Eq. 4 (arXiv 2602.23440; docs/methods/slate.md)
    Search-R1 core_algos.py:111 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/grpo.md)

    Args:
        scores: [N], one per trajectory.
        group_ids: N globally unique prompt ids.
        eps: added to the standard deviation.
        deviation: std with n-1 (`sample`: Search-R1, R-Search, DSPO) or n (`population`: SLATE) in the denominator.

    Returns:
        [N] advantages.

    >>> group_normalized(torch.tensor([1., 0.]), ["q", "q"])
    tensor([ 0.7071, -0.7071])
    """
    result = torch.empty_like(scores)
    for rows in _members(scores, group_ids):
        group_scores = scores[rows]
        if len(rows) == 1:
            result[rows] = group_scores
        elif bool((group_scores == group_scores[0]).all()):
            # The mean of equal floats can differ from them by one ulp, which the small deviation would blow up.
            result[rows] = torch.zeros_like(group_scores)
        else:
            std = group_scores.std(unbiased=deviation == "sample")
            result[rows] = (group_scores - group_scores.mean()) / (std + eps)
    return result


def _members(scores: Tensor, group_ids: Sequence[str]) -> list[list[int]]:
    """Rows of each group."""
    if len(group_ids) != len(scores):
        raise ValueError(f"{len(scores)} scores but {len(group_ids)} group ids: expected one id per score.")
    members: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    return list(members.values())


@dataclass(frozen=True)
class GroupAdvantage:
    """A trajectory's normalised reward on all its generated tokens (GRPO).

    Attributes:
        eps, deviation: see `group_normalized`.
    """

    eps: float = 1e-6
    deviation: Deviation = "sample"
    needs_values: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    compares_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.eps > 0, "eps", self.eps, "a small number above 0, such as 1e-6")

    def __call__(self, experience: Experience) -> Experience:
        """Advantages [N, T], 0 off the loss mask."""
        # In double precision sums of equal rewards are equal, whichever turns have them.
        scores = experience.rewards.double().sum(-1)
        compared = group_normalized(scores, experience.group_ids, self.eps, self.deviation)
        return replace(experience, advantages=compared.float()[:, None] * experience.loss_mask)


PART = GroupAdvantage
