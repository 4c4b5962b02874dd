"""R-Search's format reward: a little for one answer, and for one block of evidence where something was searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.rewards.blocks import is_well_formed
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class EvidenceFormatReward(EachReward):
    """`answer` for a well-formed answer, and `evidence` for well-formed evidence or where nothing was searched.

    What counts as a search is the environment's record of executed ones: an observation that the policy wrote itself
    is none.
    R-Search Eq. 5, Eq. 8 (arXiv 2506.04185; docs/methods/r_search.md)

    Attributes:
        evidence, answer: the two values; evidence 0 is the variant without evidence.
    """

    components: ClassVar[tuple[str, ...]] = ("format",)

    evidence: float
    answer: float

    def __post_init__(self) -> None:
        for name in ("evidence", "answer"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1, a right answer's value")

    @property
    def pays_evidence(self) -> bool:
        """Whether evidence is paid, so that prompt and grammar must ask for it."""
        return self.evidence > 0

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        needs_evidence = trajectory.num_searches > 0
        has_evidence = not needs_evidence or is_well_formed(trajectory, "original_evidence")
        value = self.evidence * has_evidence + self.answer * is_well_formed(trajectory, "answer")
        return on_last_token(trajectory, value, format=value)


PART = EvidenceFormatReward
