"""A model's score of each turn, such as a process reward model's; the service `turn_scores` gets one call a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rewards import Field, on_turns
from tasks.rewards.shaping import potential_differences
from tasks.services import NO_SERVICES, Role, Services
from tasks.services.numbers import check_list, check_numbers
from tasks.types import Question, Scores, Trajectory

_SERVICE = "services: turn_scores"


@dataclass(frozen=True)
class TurnScoresReward:
    """The model's score on the last token of each turn.

    PiCA Eq. 7 (arXiv 2605.09287; docs/methods/pica.md)

    Attributes:
        scale: weight of the scores.
        is_potential: true: a turn earns its score minus that of the turn before (0 before the first), so that the sum
            is the last score, however many turns there are. false: it earns its score.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("turn_scores",)
    components: ClassVar[tuple[str, ...]] = ("turn_scores",)

    scale: float
    is_potential: bool

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "0 or more")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory.

        Raises:
            ValueError: the service does not return a finite number for each turn of each trajectory.
        """
        by_turn = services["turn_scores"].score(trajectories, questions)
        check_list(by_turn, len(trajectories), _SERVICE, "trajectory")
        return [self._placed(t, scores) for t, scores in zip(trajectories, by_turn, strict=True)]

    def _placed(self, trajectory: Trajectory, scores: Sequence[float]) -> Scores:
        check_numbers(scores, len(trajectory.turns), f"{_SERVICE}: question {trajectory.question_id!r}", "turn")
        values = potential_differences([0.0, *scores]) if self.is_potential else scores
        earned = {number: self.scale * value for number, value in enumerate(values)}
        return on_turns(trajectory, earned, turn_scores=sum(scores))


PART = TurnScoresReward
