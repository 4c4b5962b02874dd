"""Dynamic sampling keeps only groups in which some members did better than others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rl.filters import by_group
from tasks.types import Sample, Scores


@dataclass(frozen=True)
class MixedOutcomes:
    """Keeps groups with both better and worse outcomes.

    For a reward R of 0 or 1 and a group of G members: 0 < sum of R < G.
    DSPO Eq. 9 (arXiv 2510.09255; docs/methods/dspo.md)
    DAPO Eq. 11 (arXiv 2503.14476; docs/methods/dspo.md)

    Attributes:
        component: the score component that means success, such as `em`. The outcome itself would not do: a length
            penalty would make every group look mixed.
        max_rounds: most draws of a step; 10 as in verl's DAPO scripts.
    """

    component: str
    max_rounds: int = 10
    compares_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.max_rounds >= 1, "max_rounds", self.max_rounds, "at least 1")

    @property
    def components(self) -> tuple[str, ...]:
        """The component that means success."""
        return (self.component,)

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        values = by_group(samples, [score.components[self.component] for score in scores])
        is_mixed = {group: min(members) < max(members) for group, members in values.items()}
        return [i for i, sample in enumerate(samples) if is_mixed[sample.group_id]]


PART = MixedOutcomes
