"""Rewards of actions by rule, in place of a judge (SLATE without its judge); the rule is ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_turns
from tasks.rewards.actions import early_bonus, thought_of, turns_of
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class RuledActions(EachReward):
    """A part of an action earns 0 where it is well-formed, else -1; an answer earns 2 F1 - 1 and the bonus.

    The parts are a thought, and a query or an answer. The paper does not say what takes the judge's place in row (b) of
    its Table 2. With exact match alone, row (c), it must not be the same.

    SLATE Eq. 6, Table 2 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        turns, bonus, budget: as for `judged_actions`.
    """

    components: ClassVar[tuple[str, ...]] = ("well_formed",)

    turns: Literal["last", "all"]
    bonus: float
    budget: int

    def __post_init__(self) -> None:
        require(self.bonus >= 0, "bonus", self.bonus, "0 or more")
        require(self.budget >= 1, "budget", self.budget, "at least 1 step")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`; the outcome is the sum of the rewards."""
        values, num_malformed = {}, 0
        for number in turns_of(trajectory, self.turns):
            turn = trajectory.turns[number]
            malformed = (not thought_of(turn.text)) + (not text.normalize(turn.action.content))
            values[number] = -float(malformed)
            num_malformed += malformed
            if turn.action.kind == "answer" and text.normalize(turn.action.content):
                values[number] += 2 * text.f1(turn.action.content, question.answers) - 1
            if turn.action.kind == "answer":
                values[number] += early_bonus(self.bonus, self.budget, number + 1)
        placed = on_turns(trajectory, values, well_formed=float(not num_malformed))
        return Scores(sum(values.values()), placed.placed, placed.components)


PART = RuledActions
