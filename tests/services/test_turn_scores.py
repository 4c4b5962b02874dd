"""A method whose reward asks a service for scores of turns, here a toy, trains through the real loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tasks.rewards.turn_scores import TurnScoresReward
from tasks.services import Resources, Role, Services, opened
from tasks.services.start_policy import StartPolicy
from tasks.types import Action, Question, Trajectory, Turn
from tests.tiny import make_method, make_tokenizer, make_trainer, question


@dataclass
class ToyScores:
    """A turn is worth 1 if its first token has an even id; every call is written down."""

    asked: list[int] = field(default_factory=list)
    is_open: bool = True

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        assert self.is_open
        assert [t.question_id for t in trajectories] == [question.id for question in questions]
        self.asked.append(len(trajectories))
        return [[float(t.response_ids[turn.start] % 2 == 0) for turn in t.turns] for t in trajectories]


@dataclass(frozen=True)
class ToyService:
    """Its settings: what a file of conf/service/ would hold."""

    role: ClassVar[Role] = "turn_scores"
    needs_reference: ClassVar[bool] = False

    scores: ToyScores

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ToyScores]:
        yield self.scores
        self.scores.is_open = False


REWARD = TurnScoresReward(1.0, is_potential=False)


def test_a_toy_service_trains_a_step_and_is_asked_for_all_trajectories_at_once(tmp_path: Path) -> None:
    service = ToyService(ToyScores())
    trainer = make_trainer(tmp_path, rewards=(REWARD,), num_steps=1, services={"turn_scores": service})
    before = {name: p.detach().clone() for name, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]
    resources = Resources(tmp_path, tmp_path)

    with opened(trainer.method.services, resources) as trainer.services:
        progress = trainer.run()

    assert progress.step == 1
    assert service.scores.asked == [16]
    assert not service.scores.is_open
    after = trainer.policy.trained  # type: ignore[attr-defined]
    assert any(not torch.equal(after[name].detach(), tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ({}, "services: nobody plays turn_scores, which TurnScoresReward calls. Add turn_scores: and the name"),
        (
            {"turn_scores": StartPolicy()},
            "services: turn_scores: kind='start_policy' plays log_probs, expected one that",
        ),
        (
            {"turn_scores": ToyService(ToyScores()), "log_probs": StartPolicy()},
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


def test_a_score_for_each_turn_or_an_error() -> None:
    message = "turn_scores: found 2 scores for question 'q', expected one for each of its 3 turns"
    with pytest.raises(ValueError, match=message):
        REWARD([played(3)], [question()], {"turn_scores": Told([2.0, 1.0])})


@dataclass
class Told:
    """Gives every trajectory these scores."""

    scores: list[float]

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        return [self.scores for _ in trajectories]
