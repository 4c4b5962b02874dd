"""Rewards of single actions: by a judge, and by rule in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tasks.rewards.actions import early_bonus, thought_of
from tasks.rewards.judged_actions import JudgedActions
from tasks.rewards.ruled_actions import RuledActions
from tasks.services import Judged, Judgement, Services
from tasks.types import Trajectory
from tests.papers import golden
from tests.tiny import make_tokenizer, play_script, question

SEARCH = "<think> so </think> <search> Avenor </search>"
ANSWER = "<think> Bristow rules </think> <answer> Bristow </answer>"


@dataclass
class Scripted:
    """A judge that says what it is told, by aspect."""

    scores: dict[str, int]
    asked: list[Judged] = field(default_factory=list)

    def judge(self, items: Sequence[Judged]) -> list[Judgement]:
        self.asked += items
        return [Judgement(self.scores[item.aspect], item.aspect) for item in items]


def played(*lines: str) -> Trajectory:
    """These calls and no more."""
    return play_script(make_tokenizer(), lines, max_turns=len(lines) - 1)


def rewarded(trajectory: Trajectory, scores: dict[str, int], turns: Any = "last", **changes: Any) -> Any:
    services: Services = {"judge": Scripted({"thought": 0, "query": 0, "answer": 0} | scores)}
    reward = JudgedActions(**{"turns": turns, "bonus": 0.1, "budget": 4} | changes)
    (found,) = reward([trajectory], [question()], services)
    return found


def test_golden_rewards() -> None:
    for row in golden("slate", "Rewards"):
        lines = [SEARCH] * (row["t"] - 1) + [SEARCH if row["action"] == "search" else ANSWER]
        kind = "query" if row["action"] == "search" else "answer"
        found = rewarded(played(*lines), {"thought": row["think"], kind: row["query or answer"]})
        assert found.outcome == pytest.approx(row["reward"], abs=1e-9)
        ((position, value),) = found.placed
        assert value == found.outcome
        trajectory = played(*lines)
        assert position == trajectory.turns[row["t"] - 1].end - 1


def test_all_turns_add_up() -> None:
    found = rewarded(played(SEARCH, ANSWER), {"thought": 1, "query": -1, "answer": 1}, "all")
    assert [value for _, value in found.placed] == [0.0, pytest.approx(2.05)]
    assert found.outcome == pytest.approx(2.05)
    assert found.components == {"judge": 2.0, "judge_unreadable": 0.0}


def test_an_action_without_search_or_answer_earns_its_thought_less_one() -> None:
    assert rewarded(played("<think> so </think> rules"), {"thought": 1}).outcome == 0.0
    assert rewarded(played("rules rules"), {"thought": -1}).outcome == -2.0


def test_an_empty_thought_is_judged() -> None:
    services: Services = {"judge": Scripted({"thought": -1, "query": 1, "answer": 1})}
    JudgedActions("last", 0.1, 4)([played("<search> Avenor </search>")], [question()], services)
    judge = services["judge"]
    assert isinstance(judge, Scripted)
    assert [(item.aspect, item.thought, item.content) for item in judge.asked] == [
        ("thought", "", ""), ("query", "", "Avenor")
    ]  # fmt: skip


def test_all_candidates_are_one_call_and_only_what_came_before_is_shown() -> None:
    judge = Scripted({"thought": 1, "query": 1, "answer": 1})
    JudgedActions("last", 0.1, 4)([played(SEARCH, ANSWER), played(SEARCH)], [question()] * 2, {"judge": judge})
    assert [len(item.before) for item in judge.asked] == [1, 1, 0, 0]
    assert judge.asked[0].before[0].hits


def test_a_judge_that_loses_an_item_is_refused() -> None:
    class Short:
        def judge(self, items: Sequence[Judged]) -> list[Judgement]:
            return [Judgement(0, "") for _ in items[1:]]

    with pytest.raises(ValueError, match="services: judge: found a list of 1, expected a list of 2"):
        JudgedActions("last", 0.1, 4)([played(SEARCH)], [question()], {"judge": Short()})


def test_the_bonus_never_falls_below_zero() -> None:
    assert early_bonus(0.1, 4, 6) == 0.0
    assert thought_of("<think> a </think> <think> b </think>") == "a"


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ([SEARCH], 0.0),
        (["<search> Avenor </search>"], -1.0),
        (["<think> so </think> rules"], -1.0),
        (["rules"], -2.0),
        ([ANSWER], 1.075),
        ([SEARCH, ANSWER], 1.05),
        (["<think> so </think> <answer> Hask </answer>"], -0.925),
        (["<think> so </think> <answer> </answer>"], -0.925),  # an empty answer is a part that is not well-formed
    ],
)
def test_rewards_by_rule(lines: list[str], value: float) -> None:
    (found,) = RuledActions("last", 0.1, 4)([played(*lines)], [question()])
    assert found.outcome == pytest.approx(value)
    assert sum(placed for _, placed in found.placed) == pytest.approx(value)
    assert set(found.components) == {"well_formed"}
