"""PiCA's penalty of long trajectories: every search from the third on costs more than the one before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field as Bound

from tasks.rewards import EachReward, on_turns
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class StepPenalty(EachReward):
    """-scale * weight * growth^(t - 3) on turn t of `first` or later, unless it answers.

    PiCA Eq. 11 (arXiv 2605.09287; docs/methods/pica.md)

    Attributes:
        scale: s, which multiplies the step rewards, too.
        weight, growth: lambda in [0, 0.5] and alpha in [1, 1.5].
        first: the first turn that is penalised, counted from 1: 3 in the paper, 4 as released.

    >>> penalty = StepPenalty(scale=1.0, weight=0.3, growth=1.5)
    >>> [round(penalty.value(t), 4) for t in range(1, 7)]
    [0.0, 0.0, 0.3, 0.45, 0.675, 1.0125]
    """

    components: ClassVar[tuple[str, ...]] = ("step_penalty",)

    scale: Annotated[float, Bound(ge=0)]
    weight: Annotated[float, Bound(ge=0, le=0.5)]
    growth: Annotated[float, Bound(ge=1, le=1.5)]
    first: Annotated[int, Bound(ge=3)] = 3

    def value(self, turn: int) -> float:
        """What turn `turn`, counted from 1, costs before `scale`."""
        return self.weight * self.growth ** (turn - 3) if turn >= self.first else 0.0

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        costs = {
            number: self.value(number + 1)
            for number, turn in enumerate(trajectory.turns)
            if turn.action.kind != "answer" and number + 1 >= self.first
        }
        earned = {number: -self.scale * cost for number, cost in costs.items()}
        return on_turns(trajectory, earned, step_penalty=sum(costs.values()))


PART = StepPenalty
