"""Rejection sampling keeps only trajectories that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.types import Sample, Scores


@dataclass(frozen=True)
class Successful:
    """Keeps the samples whose `component`, such as `em`, is 1.

    STaR Section 3.1 (arXiv 2203.14465; docs/methods/sft.md)
    """

    component: str
    max_rounds: ClassVar[int] = 1
    compares_group: ClassVar[bool] = False

    @property
    def components(self) -> tuple[str, ...]:
        """The component that means success."""
        return (self.component,)

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        return [i for i, score in enumerate(scores) if score.components[self.component] >= 1]


PART = Successful
