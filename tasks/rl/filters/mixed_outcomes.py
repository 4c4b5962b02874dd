"""Dynamic sampling: only groups in which some members did better than others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rl.filters import by_group
from tasks.types import Sample, Scores


@dataclass(frozen=True)
class MixedOutcomes:
    """Keeps groups with both better and worse outcomes (DAPO, arXiv:2503.14476, Eq. 11).

    For a reward R of 0 or 1 and a group of G members: 0 < sum of R < G.

    Attributes:
        part: the reward part that tells success, so that a length penalty cannot make a group look mixed.
        max_rounds: bound of the refill; 10 as in verl's DAPO scripts.
    """

    part: str
    max_rounds: int = 10
    compares_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.max_rounds >= 1, "max_rounds", self.max_rounds, "at least 1")

    @property
    def score_parts(self) -> tuple[str, ...]:
        """The part that tells success."""
        return (self.part,)

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        values = by_group(samples, [score.parts[self.part] for score in scores])
        is_mixed = {group: min(members) < max(members) for group, members in values.items()}
        return [i for i, sample in enumerate(samples) if is_mixed[sample.group_id]]


PART = MixedOutcomes
