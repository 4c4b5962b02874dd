"""Rejection sampling: only trajectories that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.types import Sample, Scores


@dataclass(frozen=True)
class Successful:
    """Keeps the samples whose part is 1 (rejection sampling)."""

    part: str
    max_rounds: ClassVar[int] = 1
    compares_group: ClassVar[bool] = False

    @property
    def score_parts(self) -> tuple[str, ...]:
        """The part that tells success."""
        return (self.part,)

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        return [i for i, score in enumerate(scores) if score.parts[self.part] >= 1]


PART = Successful
