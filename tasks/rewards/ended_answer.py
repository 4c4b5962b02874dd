"""The outcome's reward of PiCA's release: the answer's score if the response ends with an answer, else a penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.types import Question, Scores, Trajectory

_METRICS = {"em": text.exact_match, "f1": text.f1}


@dataclass(frozen=True)
class EndedAnswer(EachReward):
    """weight * metric(answer, golds) where the response ends with `</answer>`, else `wrong_format`.

    PiCA main_ppo.py:163 (novdream/PiCA@35b15c7; docs/methods/pica.md)

    Attributes:
        metric, weight, wrong_format: see above.
    """

    metric: Literal["em", "f1"]
    weight: float
    wrong_format: float

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight", self.weight, "0 or more")
        require(self.wrong_format <= 0, "wrong_format", self.wrong_format, "0 or less: a wrong format earns nothing")

    @property
    def components(self) -> tuple[str, ...]:
        """The metric, and whether the format is right."""
        return (self.metric, "format")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        value = _METRICS[self.metric](trajectory.answer, question.answers)
        is_right = trajectory.status == "answered" and trajectory.turns[-1].text.rstrip().endswith("</answer>")
        earned = self.weight * value if is_right else self.wrong_format
        return on_last_token(trajectory, earned, **{self.metric: value, "format": float(is_right)})


PART = EndedAnswer
