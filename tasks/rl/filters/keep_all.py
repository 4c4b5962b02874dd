"""No filter: every sample is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.types import Sample, Scores


@dataclass(frozen=True)
class KeepAll:
    """Keeps every sample. Trajectories of status `failed` never reach a filter.

    Search-R1 Section 3.1 (arXiv 2503.09516; docs/methods/search_r1.md)
    """

    max_rounds: ClassVar[int] = 1
    components: ClassVar[tuple[str, ...]] = ()
    compares_group: ClassVar[bool] = False

    def keep(self, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[int]:
        """See `Filter`."""
        return list(range(len(samples)))


PART = KeepAll
