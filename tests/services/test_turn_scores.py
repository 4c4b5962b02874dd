"""A reward that asks a service for scores of turns: where they are placed, and which services it may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tasks.rewards.turn_scores import TurnScoresReward
from tasks.services import Services
from tasks.services.start_policy import StartPolicy
from tasks.types import Action, Question, Trajectory, Turn
from tests.services.parity import Parity
from tests.tiny import make_method, make_tokenizer, question

REWARD = TurnScoresReward(1.0, is_potential=False)


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ({}, "services: nobody plays turn_scores, which TurnScoresReward calls. Add turn_scores: and the name"),
        (
            {"turn_scores": StartPolicy()},
            "services: turn_scores: kind='start_policy' plays log_probs, expected one that",
        ),
        (
            {"turn_scores": Parity(1.0, 0.0), "log_probs": StartPolicy()},
            "services: log_probs is named, but no part of this method calls it. Remove it.",
        ),
    ],
)
def test_services_that_do_not_fit_the_parts_are_refused(services: dict[Any, Any], message: str) -> None:
    method = make_method("grpo", make_tokenizer())
    with pytest.raises(ValueError) as caught:
        replace(method, rewards=(REWARD,), services=services)
    assert str(caught.value).startswith(message)


def played(num_turns: int) -> Trajectory:
    """Turns of two tokens and an observation of one."""
    turns = tuple(Turn(Action("search", "q"), 3 * i, 3 * i + 2, 3 * i + 3, executed=True) for i in range(num_turns))
    mask = (True, True, False) * num_turns
    return Trajectory("q", "g", (1,), tuple(range(len(mask))), mask, (0.0,) * len(mask), turns, "open")


@pytest.mark.parametrize(
    ("is_potential", "placed"),
    [(False, ((1, 1.0), (4, 0.5), (7, 2.0))), (True, ((1, 1.0), (4, -0.5), (7, 1.5)))],
)
def test_golden_placement(is_potential: bool, placed: Any) -> None:
    """Scores 2, 1 and 4 at scale 0.5; as a potential the turns sum up to the last score."""
    services: Services = {"turn_scores": Told([2.0, 1.0, 4.0])}
    (score,) = TurnScoresReward(0.5, is_potential)([played(3)], [question()], services)
    assert score.placed == placed
    assert (score.outcome, score.components) == (0.0, {"turn_scores": 7.0})


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[2.0, 1.0]], "question 'q': found a list of 2, expected a list of 3, one entry for each turn. Mend"),
        ([None], "question 'q': found None, expected a list of 3"),
        ([[2.0, 1.0, None]], "question 'q': turn 3: found None, expected a finite number. Mend"),
        ([["2.0", 1.0, 1.0]], "question 'q': turn 1: found '2.0', expected a finite number"),
        ([[2.0, math.nan, 1.0]], "question 'q': turn 2: found nan, expected a finite number"),
        ([[2.0, 1.0, math.inf]], "question 'q': turn 3: found inf, expected a finite number"),
        ([], "found a list of 0, expected a list of 1, one entry for each trajectory. Mend"),
        ([[2.0, 1.0, 1.0]] * 2, "found a list of 2, expected a list of 1"),
        (None, "found None, expected a list of 1"),
    ],
)
def test_a_finite_score_for_each_turn_or_an_error_of_one_line(scores: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        REWARD([played(3)], [question()], {"turn_scores": Returned(scores)})
    assert str(caught.value).startswith(f"services: turn_scores: {message}")
    assert "\n" not in str(caught.value)


@dataclass
class Told:
    """Gives every trajectory these scores."""

    scores: list[float]

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        return [self.scores for _ in trajectories]


@dataclass
class Returned:
    """Returns this, whatever it was asked."""

    value: Any

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> Any:
        return self.value
