"""A judge's scores of actions (SLATE): thought and query, or thought and answer with a bonus for an early answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from tasks.conf import require
from tasks.rewards import Field, on_turns
from tasks.rewards.actions import early_bonus, thought_of, turns_of
from tasks.services import NO_SERVICES, Aspect, Judged, Judgement, Role, Services
from tasks.services.numbers import check_list
from tasks.types import Note, Question, Scores, Trajectory

_SERVICE = "services: judge"
_INVALID = -1.0
_ASPECTS: dict[str, Aspect] = {"search": "query", "answer": "answer"}


@dataclass(frozen=True)
class JudgedActions:
    """Thought + query for a search, thought + answer + bonus (budget - t) / budget for an answer at step t from 1.

    An action that is neither earns its thought's score - 1. All actions of a batch are judged in one call, each before
    its search is executed.

    SLATE Eq. 5, Eq. 6 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        turns: `last` rewards only the newest action, for a sampler that scores every action when it is drawn; `all`
            rewards every action of a trajectory.
        bonus: for an answer before the last step of the budget.
        budget: steps that a question may take.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("judge",)
    components: ClassVar[tuple[str, ...]] = ("judge", "judge_unreadable")

    turns: Literal["last", "all"]
    bonus: float
    budget: int

    def __post_init__(self) -> None:
        require(self.bonus >= 0, "bonus", self.bonus, "0 or more")
        require(self.budget >= 1, "budget", self.budget, "at least 1 step")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; its outcome is the sum of the rewards.

        Raises:
            ServiceError: the judge cannot answer now.
            ValueError: the judge does not return one judgement for each item.
        """
        items: list[Judged] = []
        places: list[list[tuple[int, list[int]]]] = []  # Of each trajectory: turns, and the numbers of their items.
        for trajectory, question in zip(trajectories, questions, strict=True):
            places.append([])
            for number in turns_of(trajectory, self.turns):
                judged = _items(trajectory, question, number)
                places[-1].append((number, list(range(len(items), len(items) + len(judged)))))
                items += judged

        judgements = services["judge"].judge(items) if items else []
        check_list(judgements, len(items), _SERVICE, "item")
        return [
            self._placed(trajectory, [(number, [judgements[i] for i in of_turn]) for number, of_turn in of_trajectory])
            for trajectory, of_trajectory in zip(trajectories, places, strict=True)
        ]

    def _placed(self, trajectory: Trajectory, judged: Sequence[tuple[int, Sequence[Judgement]]]) -> Scores:
        values = {number: self._reward(trajectory, number, judgements) for number, judgements in judged}
        each = [judgement for _, judgements in judged for judgement in judgements]
        placed = on_turns(
            trajectory,
            values,
            judge=float(sum(judgement.score for judgement in each)),
            judge_unreadable=float(sum(not judgement.is_readable for judgement in each)),
        )
        notes = tuple(note for number, judgements in judged for note in _notes(trajectory, number, judgements))
        return Scores(sum(values.values()), placed.placed, placed.components, notes)

    def _reward(self, trajectory: Trajectory, number: int, judgements: Sequence[Judgement]) -> float:
        reward = float(sum(judgement.score for judgement in judgements))
        kind = trajectory.turns[number].action.kind
        if kind == "answer":
            return reward + early_bonus(self.bonus, self.budget, number + 1)
        return reward if kind == "search" else reward + _INVALID


def _items(trajectory: Trajectory, question: Question, number: int) -> list[Judged]:
    """What of an action is judged: its thought, also an empty one, and its query or answer if it has one."""
    turn, before = trajectory.turns[number], trajectory.turns[:number]
    thought = thought_of(turn.text)
    items = [Judged("thought", question, before, thought)]
    if turn.action.kind in _ASPECTS:
        content = " ; ".join(turn.action.searches) or turn.action.content
        items.append(Judged(_ASPECTS[turn.action.kind], question, before, thought, content))
    return items


def _notes(trajectory: Trajectory, number: int, judgements: Sequence[Judgement]) -> list[Note]:
    """The judge's scores with their reasons; the first is the thought's."""
    names = ("judge: thought", f"judge: {_ASPECTS.get(trajectory.turns[number].action.kind)}")
    return [
        Note(number, name, float(judgement.score) if judgement.is_readable else None, judgement.reason)
        for name, judgement in zip(names, judgements, strict=False)
    ]


PART = JudgedActions
