"""Outcome rewards: the final answer against the golds, placed on the last token the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks import text
from tasks.rewards import EachReward, Resources, on_last_token
from tasks.rewards.format import follows_search_rule, is_well_formed
from tasks.types import Question, Scores, Trajectory

METRICS = {"em": text.exact_match, "subem": text.substring_match, "f1": text.f1}


@dataclass(frozen=True)
class AnswerReward(EachReward):
    """weight * metric(answer, golds); no answer scores 0 (search_r1 section 3).

    Attributes:
        metric, weight: see above.
        gated: earned only where the trajectory follows StepSearch's format rule (stepsearch sections 1 and 3).
        wrong_format: what a gated trajectory gets instead; -1 as released.
    """

    metric: Literal["em", "subem", "f1"] = "em"
    weight: float = 1.0
    gated: bool = False
    wrong_format: float = 0.0

    def score(self, trajectory: Trajectory, question: Question, resources: Resources) -> Scores:
        """See `EachReward`."""
        value = METRICS[self.metric](trajectory.answer, question.answers)
        earned = self.weight * value
        parts: dict[str, float] = {self.metric: value}
        if self.gated:
            parts["format"] = float(follows_search_rule(trajectory))
            earned = earned if parts["format"] else self.wrong_format
        return on_last_token(trajectory, earned, **parts)


@dataclass(frozen=True)
class FormatAnswerReward(EachReward):
    """Search-R1 v0.3's table: exact match with credit for structure, answer tag and retrieval (search_r1 section 3).

    Attributes:
        structure: s, reward of a valid structure without a right answer, and its penalty when missing.
        answer_tag: f, reward of an answer in a broken structure.
        retrieval: q, bonus when a gold answer was retrieved in a valid structure.
    """

    structure: float = 0.2
    answer_tag: float = 0.1
    retrieval: float = 0.0

    def score(self, trajectory: Trajectory, question: Question, resources: Resources) -> Scores:
        """See `EachReward`."""
        em = text.exact_match(trajectory.answer, question.answers)
        valid = is_well_formed(trajectory.response_text)
        return on_last_token(trajectory, self._value(trajectory, question, em, valid), em=em)

    def _value(self, trajectory: Trajectory, question: Question, em: float, valid: bool) -> float:
        if em:
            return 1.0 if valid else 1.0 - self.structure
        if valid:
            found = any(
                text.substring_match(f"{hit.title} {hit.text}", question.answers)
                for turn in trajectory.turns
                for hit in turn.hits
            )
            return self.structure + (self.retrieval if found else 0.0)
        return self.answer_tag if trajectory.answer is not None else 0.0
