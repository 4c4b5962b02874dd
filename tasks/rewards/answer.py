"""The final answer against the gold answers, placed on the last token the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.rewards.format import follows_search_rule
from tasks.types import Question, Scores, Trajectory

ANSWER_METRICS = {"em": text.exact_match, "subem": text.substring_match, "f1": text.f1}


@dataclass(frozen=True)
class AnswerReward(EachReward):
    """weight * metric(answer, golds); no answer scores 0.

    Search-R1 Section 3.4 (arXiv 2503.09516; docs/methods/search_r1.md)
    StepSearch Eq. 3 (arXiv 2505.15107; docs/methods/stepsearch.md)
    DSPO Eq. 4 (arXiv 2510.09255; docs/methods/dspo.md)

    Attributes:
        metric, weight: see above.
        gated: earned only where the trajectory follows StepSearch's format rule.
        wrong_format: what a gated trajectory gets instead; -1 as released.
    """

    metric: Literal["em", "subem", "f1"] = "em"
    weight: float = 1.0
    gated: bool = False
    wrong_format: float = 0.0

    def __post_init__(self) -> None:
        require(self.wrong_format <= 0, "wrong_format", self.wrong_format, "0 or less: a wrong format earns nothing")

    @property
    def components(self) -> tuple[str, ...]:
        """The metric; with a gate, also whether the format is right."""
        return (self.metric, "format") if self.gated else (self.metric,)

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        value = ANSWER_METRICS[self.metric](trajectory.answer, question.answers)
        earned = self.weight * value
        components: dict[str, float] = {self.metric: value}
        if self.gated:
            components["format"] = float(follows_search_rule(trajectory))
            earned = earned if components["format"] else self.wrong_format
        return on_last_token(trajectory, earned, **components)


PART = AnswerReward
