"""StepSearch's reward on intermediate answers ("ow sub-answer"); the paper does not print its formula."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, Field, on_last_token
from tasks.rewards.format import follows_search_rule
from tasks.types import Question, Scores, Trajectory

_SUB_ANSWER = re.compile(r"<sub_answer(\d{1,3})>(.*?)</sub_answer\1>", re.DOTALL)


@dataclass(frozen=True)
class SubAnswerReward(EachReward):
    """weight * (1/M) sum_i F1(sub-answer i, gold sub-answer i), on the last token; 0 in a wrong format.

    A missing sub-answer scores 0; of several pairs with one number the last counts. The formula is ours:
    StepSearch Section 4.2 (arXiv 2505.15107; docs/methods/stepsearch.md)
    """

    components: ClassVar[tuple[str, ...]] = ("sub_answer",)

    weight: float

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight", self.weight, "0 or more")

    @property
    def reads(self) -> tuple[Field, ...]:
        """Sub-answers."""
        return ("decomposition",)

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        written = "".join(turn.text for turn in trajectory.turns)
        given = {int(number): answer for number, answer in _SUB_ANSWER.findall(written)}
        f1s = [text.f1(given.get(i), (hop.answer,)) for i, hop in enumerate(question.decomposition, 1)]
        value = sum(f1s) / len(f1s) if f1s else 0.0
        earned = value if follows_search_rule(trajectory) else 0.0
        return on_last_token(trajectory, self.weight * earned, sub_answer=value)


PART = SubAnswerReward
