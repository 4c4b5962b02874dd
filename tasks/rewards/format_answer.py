"""Search-R1 v0.3's format table: exact match with credit for structure, on the last token the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.rewards.format import is_well_formed
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class FormatAnswerReward(EachReward):
    """Search-R1 v0.3's table: exact match with credit for structure, answer tag and retrieval.

    Search-R1 qa_em_format.py:154 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/search_r1.md)

    Attributes:
        structure: reward of a valid structure without a right answer; a right answer without it loses as much.
        answer_tag: reward of a wrong answer in a broken structure.
        retrieval: bonus for a wrong answer in a valid structure where a search returned a gold answer.
    """

    components: ClassVar[tuple[str, ...]] = ("em",)

    structure: float = 0.2
    answer_tag: float = 0.1
    retrieval: float = 0.0

    def __post_init__(self) -> None:
        for name in ("structure", "answer_tag", "retrieval"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share of a right answer's 1, 0 to 1")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        em = text.exact_match(trajectory.answer, question.answers)
        valid = is_well_formed(trajectory.response_text)
        return on_last_token(trajectory, self._value(trajectory, question, em, valid), em=em)

    def _value(self, trajectory: Trajectory, question: Question, em: float, valid: bool) -> float:
        if em:
            return 1.0 if valid else 1.0 - self.structure
        if valid:
            is_retrieved = any(
                text.substring_match(f"{hit.title} {hit.text}", question.answers)
                for turn in trajectory.turns
                for hit in turn.hits
            )
            return self.structure + (self.retrieval if is_retrieved else 0.0)
        return self.answer_tag if trajectory.answer is not None else 0.0


PART = FormatAnswerReward
