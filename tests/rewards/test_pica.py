"""PiCA's step rewards: golden values, where they land, missing scores, and what a reward model may not return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.rewards.answer import AnswerReward
from tasks.rewards.ended_answer import EndedAnswer
from tasks.rewards.hazard_steps import HazardSteps
from tasks.rewards.step_penalty import StepPenalty
from tasks.rewards.success_gain import SuccessGain
from tasks.rl.advantages.gae import turn_gae
from tasks.services import Probabilities, ServiceError, Services
from tasks.types import Action, Question, Trajectory, Turn
from tests.papers import column, golden
from tests.tiny import question

GAIN = SuccessGain(scale=1.0, keep_final=True, limit=20.0)
KINDS = {"s": "search", "a": "answer", "i": "invalid"}


def played(kinds: str) -> Trajectory:
    """Turns of two tokens and an observation of one; `s` searches, `i` is invalid, `a` answers."""
    turns = tuple(
        Turn(
            Action(KINDS[kind], "q"),  # type: ignore[arg-type]
            3 * i, 3 * i + 2, 3 * i + 3,
            text="<think> so </think> <search> q </search>" if kind == "s" else "<answer> Bristow </answer>",
            executed=kind == "s",
        )
        for i, kind in enumerate(kinds)
    )  # fmt: skip
    mask = (True, True, False) * len(kinds)
    ended = kinds.endswith("a")
    return Trajectory(
        "q", "g", (1,), tuple(range(len(mask))), mask, (0.0,) * len(mask), turns, "answered" if ended else "open",
        "Bristow" if ended else None,
    )  # fmt: skip


@dataclass
class Told:
    """Gives every trajectory these probabilities, or whatever it was told."""

    value: Any

    def probabilities(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> Any:
        return [self.value for _ in trajectories]


def scored(reward: Any, trajectory: Trajectory, before: float, *after: float | None) -> tuple[dict[int, float], Any]:
    """Turn -> reward, and the components."""
    services: Services = {"reward_model": Told(Probabilities(before, after))}
    (score,) = reward([trajectory], [question()], services)
    assert score.outcome == 0.0
    return {place // 3: value for place, value in score.placed}, score.components


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_golden_gains() -> None:
    wanted = column("pica", "Rewards of turns", "quantity", "values")["reward"]
    placed, components = scored(GAIN, played("sssa"), 0.2, 0.3, 0.6, 0.5, 0.9)
    assert list(placed.values()) == near(wanted)
    assert components == {"success_gain": near(1.504077), "missing_scores": 0.0, "start_success": 0.2}


def test_golden_clamped_gains() -> None:
    wanted = column("pica", "Clamped rewards", "quantity", "values")
    placed, _ = scored(GAIN, played("ssa"), 0.5, 0.0, 0.4, 1.0)
    assert list(placed.values()) == near(wanted["reward"])
    placed, _ = scored(SuccessGain(1.0, keep_final=True), played("ssa"), 0.5, 0.0, 0.4, 1.0)
    assert list(placed.values()) == near(wanted["cut"])


@given(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_gains_telescope(before: float, after: list[float]) -> None:
    placed, _ = scored(GAIN, played("s" * (len(after) - 1) + "a"), before, *after)
    first, last = (math.log(min(max(f, 1e-4), 1 - 1e-4)) for f in (before, after[-1]))
    assert sum(placed.values()) == pytest.approx(last - first, abs=1e-9)
    assert all(math.isfinite(value) for value in placed.values())


def test_a_reader_sees_the_probabilities_beside_the_turns() -> None:
    services: Services = {"reward_model": Told(Probabilities(0.2, (0.4, None, 0.8)))}
    (score,) = GAIN([played("sia")], [question()], services)
    assert [(note.turn, note.name, note.value) for note in score.notes] == [
        (-1, "f(t)", 0.2), (0, "f(t)", 0.4), (2, "f(t)", 0.8),
    ]  # fmt: skip


def test_the_last_turn_earns_nothing_unless_it_is_kept() -> None:
    trajectory = played("sa")
    assert scored(SuccessGain(0.3), trajectory, 0.2, 0.4, 0.9)[0] == {0: near(0.3 * math.log(2))}
    assert scored(SuccessGain(0.3, keep_final=True), trajectory, 0.2, 0.4, 0.8)[0] == {
        0: near(0.3 * math.log(2)), 1: near(0.3 * math.log(2)),
    }  # fmt: skip
    # A play that ends in a search has no f(T) of a turn: its last search earns its gain.
    assert scored(SuccessGain(1.0), played("s"), 0.2, 0.4)[0] == {0: near(math.log(2))}


def test_without_a_search_only_the_outcome_speaks() -> None:
    assert scored(SuccessGain(1.0), played("a"), 0.2, 0.9)[0] == {}


def test_a_missing_score_earns_nothing_and_is_counted() -> None:
    placed, components = scored(GAIN, played("sssa"), 0.2, 0.4, None, 0.8, None)
    assert placed == {0: near(math.log(2)), 2: near(math.log(2))}
    assert components["missing_scores"] == 1.0
    placed, components = scored(GAIN, played("sisa"), 0.2, 0.4, None, 0.8, 0.8)
    assert placed == {0: near(math.log(2)), 2: near(math.log(2)), 3: near(0.0)}
    assert components["missing_scores"] == 0.0  # The invalid turn searched nothing.


@pytest.mark.parametrize("reward", [replace(GAIN, max_missing_share=0.4), HazardSteps(0.3, 0.55, 0.3, 1.5, 0.4)])
def test_a_step_without_enough_scores_ends_the_run(reward: Any) -> None:
    """Two of five searches have none, then three: half of all turns, but more than the share of the searches."""

    class Short:
        def __init__(self, read: int) -> None:
            self.read = read

        def probabilities(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> Any:
            after = [[0.5 if n < self.read else None for n in range(len(t.turns))] for t in trajectories]
            return [Probabilities(0.5, tuple(one)) for one in after]

    plays = [played("sia"), played("ssss")]
    scores = reward(plays, [question()] * 2, {"reward_model": Short(2)})
    assert [score.components["missing_scores"] for score in scores] == [0.0, 2.0]
    with pytest.raises(ServiceError, match=r"^services: reward_model: found no score for 3 of 5 searches, .* of 0\.4 "):
        reward(plays, [question()] * 2, {"reward_model": Short(1)})


@pytest.mark.parametrize("reward", [GAIN, HazardSteps(0.3, 0.55, 0.3, 1.5)])
@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Probabilities(0.2, (0.4,)), "question 'q': found a list of 2, expected a list of 3, one entry for each turn"),
        (Probabilities(0.2, (0.4, math.nan)), "question 'q': turn 2: found nan, expected a number from 0 to 1"),
        (Probabilities(0.2, (-0.1, 0.4)), "question 'q': turn 1: found -0.1, expected a number from 0 to 1"),
        (Probabilities(1.5, (0.1, 0.4)), "question 'q': before the first turn: found 1.5, expected a number from"),
        (Probabilities(None, (0.1, 0.4)), "question 'q': before the first turn: found None"),  # type: ignore[arg-type]
        (Probabilities(0.5, ("0.1", 0.4)), "question 'q': turn 1: found '0.1'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_probability_ends_the_step_with_one_line(reward: Any, found: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        reward([played("sa")], [question()], {"reward_model": Told(found)})
    assert str(caught.value).startswith(f"services: reward_model: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("which", "first"), [("paper", 3), ("release", 4)])
def test_golden_penalties(which: str, first: int) -> None:
    penalty = StepPenalty(1.0, 0.3, 1.5, first)
    for row in golden("pica", "Step penalty"):
        assert penalty.value(row["t"]) == near(row[which])


def test_golden_penalties_of_every_search_of_the_release() -> None:
    """The penalty grows with each search, also beyond the fourth; scale and baseline apply to it as to the hazard."""
    plain, scaled = HazardSteps(1.0, 0.0, 0.3, 1.5), HazardSteps(0.3, 0.55, 0.3, 1.5)
    for row in golden("pica", "Step penalty"):
        assert plain.value(row["t"], 0.0) == near(1 - row["release"])
        assert scaled.value(row["t"], 0.1) == near(0.3 * (0.35 - row["release"]))
    placed, _ = scored(plain, played("ssssssa"), 0.5, *[0.0] * 7)
    assert list(placed.values()) == near([1 - row["release"] for row in golden("pica", "Step penalty")])


def test_the_penalty_lands_on_searches_from_the_third_on_and_not_on_the_answer() -> None:
    (score,) = StepPenalty(0.3, 0.3, 1.5)([played("ssisa")], [question()])
    assert {place // 3: value for place, value in score.placed} == {2: near(-0.3 * 0.3), 3: near(-0.3 * 0.45)}
    assert score.components == {"step_penalty": near(0.75)}
    (score,) = StepPenalty(0.3, 0.3, 1.5)([played("ssa")], [question()])
    assert score.placed == ()


def test_golden_steps_of_the_release() -> None:
    for row in golden("pica", "Release's step rewards"):
        reward = HazardSteps(row["scale"], 0.55, 0.3, 1.5)
        placed, components = scored(reward, played("ssssa"), 0.5, 0.10, 0.35, 0.60, 0.50, 0.9)
        assert list(placed.values()) == near(row["values"])
        assert components == {"hazard": near(0.3875), "missing_scores": 0.0}


def test_a_wrong_format_has_no_steps_in_the_release() -> None:
    reward = HazardSteps(0.3, 0.55, 0.3, 1.5)
    assert scored(reward, played("ss"), 0.5, 0.1, 0.1)[0] == {}
    assert scored(reward, played("a"), 0.5, 0.1)[0] == {}


@pytest.mark.parametrize("case", golden("pica", "Advantages over turns"))
def test_golden_advantages_from_rewards_on(case: dict[str, Any]) -> None:
    """R = [0.105, 0.03, 1.2]: steps of hazards 0.1 and 0.35, and 1.5 times an F1 of 0.8; then their advantages."""
    trajectory = replace(played("ssa"), answer="Bristow town")
    asked = question(answers=("Bristow town hall",))
    services: Services = {"reward_model": Told(Probabilities(0.5, (0.1, 0.35, 0.9)))}
    rewards = (HazardSteps(0.3, 0.55, 0.3, 1.5), EndedAnswer("f1", 1.5, -1.5), AnswerReward("f1", 1.5))
    steps, of_release, of_paper = (reward([trajectory], [asked], services)[0] for reward in rewards)
    assert dict(steps.placed) == near({1: 0.105, 4: 0.03})
    assert dict(of_release.placed) == dict(of_paper.placed) == near({7: 1.2})
    assert of_release.outcome == of_paper.outcome == near(1.2)

    given_ = torch.zeros(1, 9, dtype=torch.double)
    for place, value in (*steps.placed, *of_paper.placed):
        given_[0, place] += value
    values = torch.full((1, 9), 9.0, dtype=torch.double)
    values[0, [0, 3, 6]] = torch.tensor([0.3, 0.4, 0.5], dtype=torch.double)
    found, _ = turn_gae(given_, values, torch.tensor([trajectory.loss_mask]), case["gamma"], case["lam"])
    assert found[0, [0, 3, 6]].tolist() == near(case["advantages of turns"])


def test_the_outcome_of_the_release() -> None:
    reward = EndedAnswer("f1", 1.5, -1.5)
    (right,) = reward([played("sa")], [question()])
    assert (right.outcome, right.components) == (1.5, {"f1": 1.0, "format": 1.0})
    (wrong,) = reward([played("s")], [question()])
    assert (wrong.outcome, wrong.components) == (-1.5, {"f1": 0.0, "format": 0.0})
    (part,) = reward([played("a")], [question(answers=("Bristow and others of that town",))])
    assert part.outcome == near(1.5 * 2 / 7)
