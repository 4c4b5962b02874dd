"""A filter that goes on sampling: rounds, surplus, skipped updates; dropped groups change nothing (dspo 4 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.checkpoint import read_state
from tasks.rewards import on_last_token
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.filters.mixed_outcomes import MixedOutcomes
from tasks.rl.filters.successful import Successful
from tasks.rl.samplers import Draw, draw_of_trajectories
from tasks.train.health import CollapseConf
from tasks.train.loop import Trainer
from tasks.train.order import Order
from tasks.types import Action, Question, Scores, Trajectory, Turn
from tests.tiny import make_trainer

PATTERNS = {"m": ("1", "0"), "z": ("0", "0"), "o": ("1", "1")}


@dataclass
class Planned:
    """Draw n's groups come out as the n-th word says: m mixed, z all wrong, o all right; the last word stays."""

    plan: Sequence[str]
    size: int = 2
    from_start: bool = False
    has_logprobs: bool = True
    drawn: list[list[str]] = field(default_factory=list)

    def draw(self, player: Any, questions: Sequence[Question], sampling: Any, score: Any) -> Draw:
        word = self.plan[min(len(self.drawn), len(self.plan) - 1)]
        self.drawn.append([q.id for q in questions])
        rows = [
            played(question, i, member, answer)
            for i, (question, letter) in enumerate(zip(questions, word, strict=False))
            for member, answer in enumerate(PATTERNS[letter])
        ]
        return draw_of_trajectories(rows, self.size, questions, score)


def played(question: Question, number: int, member: int, answer: str) -> Trajectory:
    """Ids that depend on the question and the member alone; three to five tokens."""
    seed = int(question.id[1:])
    ids = tuple((31 * seed + 17 * member + 7 * j) % 250 for j in range(3 + member + seed % 2))
    turn = Turn(Action("answer", answer), 0, len(ids), len(ids))
    name = f"{question.id}#{number}"
    return Trajectory(
        question.id, name, (5, 6), ids, (True,) * len(ids), (-5.8,) * len(ids), (turn,), "answered", answer
    )


@dataclass(frozen=True)
class Said:
    """The reward is the answer, a number."""

    reads: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    components: tuple[str, ...] = ("em",)

    def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
        return [on_last_token(t, float(t.answer), em=float(t.answer)) for t in trajectories]


def trainer(scratch: Path, plan: Sequence[str], keep: Any = None, **changes: Any) -> tuple[Trainer, Planned]:
    sampler = Planned(plan)
    base: dict[str, Any] = {"num_steps": 1, "prompts_per_step": 2, "rollouts_per_step": None, "validate_every": 100}
    made = make_trainer(scratch, sampler=sampler, rewards=(Said(),), **(base | changes))
    made.method = replace(made.method, filter=keep or MixedOutcomes("em"))
    made.validation = []
    return made, sampler


def steps(made: Trainer) -> list[dict[str, float]]:
    made.run()
    return [row["metrics"] for row in made.progress.history if row["step"] > 0]


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    made.policy.save(folder := made.scratch / "weights")
    tensors, _ = read_state(folder)
    return tensors


def test_it_samples_until_it_has_its_groups(tmp_path: Path) -> None:
    """Of draws mz, oz, mm two groups are trained on, the third mixed one is surplus; the report tells of all six."""
    made, sampler = trainer(tmp_path / "a", ["mz", "oz", "mm", "zz"])
    (found,) = steps(made)
    assert len(sampler.drawn) == 3
    assert len({name for draw in sampler.drawn for name in draw}) == 6  # filtered prompts are used up
    assert (found["sampling_rounds"], found["filter_kept_share"]) == (3, 0.5)
    assert (found["share_all_zero"], found["share_all_one"]) == (pytest.approx(2 / 6), pytest.approx(1 / 6))
    assert found["reward_mean"] == pytest.approx((3 + 2) / 12)
    assert made.progress.num_trajectories == 12
    assert made.progress.num_draws == 3
    assert found["skipped_update"] == 0.0


def test_dropped_groups_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is, bit for bit, that of the kept groups played alone."""
    filtered, sampler = trainer(tmp_path / "a", ["mz", "oz", "mm"])
    start = weights(filtered)
    steps(filtered)
    alone, other = trainer(tmp_path / "b", ["mm"], KeepAll())
    wanted = [sampler.drawn[0][0], sampler.drawn[2][0]]
    alone.questions = [q for name in wanted for q in filtered.questions if q.id == name]
    monkeypatch.setattr(Order, "draw", lambda order, number: list(order.questions))
    steps(alone)
    assert other.drawn == [wanted]
    assert weights(filtered).keys() == weights(alone).keys()
    assert all(torch.equal(value, weights(alone)[name]) for name, value in weights(filtered).items())
    assert any(not torch.equal(value, start[name]) for name, value in weights(filtered).items() if name in start)


def test_no_group_survives(tmp_path: Path) -> None:
    """The rounds are bounded; the update is skipped, counted, and the weights stay."""
    made, sampler = trainer(tmp_path, ["zo"], MixedOutcomes("em", 4), num_steps=2)
    before = weights(made)
    found = steps(made)
    assert [metrics["skipped_update"] for metrics in found] == [1.0, 1.0]
    assert [metrics["sampling_rounds"] for metrics in found] == [4, 4]
    assert [metrics["filter_kept_share"] for metrics in found] == [0.0, 0.0]
    assert len(sampler.drawn) == 8
    model = {name: value for name, value in weights(made).items() if name in before}
    assert all(torch.equal(value, before[name]) for name, value in model.items())
    assert "loss" not in found[0]


def test_a_run_of_skipped_updates_ends(tmp_path: Path) -> None:
    rule = CollapseConf(9, None, None, None, max_skipped=3)
    made, _ = trainer(tmp_path, ["zz"], MixedOutcomes("em", 1), num_steps=9, collapse=rule)
    assert len(steps(made)) == 3
    assert made.progress.stopped is not None
    assert "3 updates in a row were skipped" in made.progress.stopped


@pytest.mark.parametrize(
    ("plan", "is_enough"),
    [(["mzzz", "mzzz"], True), (["mzzz", "zzzz"], False), (["mmzz", "mzzz"], True), (["mmmm"], True)],
)
def test_at_least_one_mini_batch(tmp_path: Path, plan: list[str], is_enough: bool) -> None:
    """Four groups are wanted in two mini-batches: two are enough after the last round, one is not."""
    made, _ = trainer(tmp_path, plan, MixedOutcomes("em", 2), prompts_per_step=4, minibatches=2)
    (found,) = steps(made)
    assert found["skipped_update"] == 1.0 - is_enough
    assert found["sampling_rounds"] == (1 if plan == ["mmmm"] else 2)


def test_a_filter_that_does_not_refill_draws_once(tmp_path: Path) -> None:
    made, sampler = trainer(tmp_path, ["oz"], Successful("em"))
    (found,) = steps(made)
    assert len(sampler.drawn) == 1
    assert "sampling_rounds" not in found
    assert "skipped_update" not in found
    made, _ = trainer(tmp_path / "none", ["zz"], Successful("em"))
    assert steps(made)[0]["skipped_update"] == 1.0


def test_the_same_question_in_two_rounds_is_two_groups(tmp_path: Path) -> None:
    """Two questions, all of them in every draw: a group of round one and its namesake of round two stay apart."""
    made, sampler = trainer(tmp_path, ["mz", "mz"])
    made.questions = list(made.questions[:2])
    (found,) = steps(made)
    assert found["sampling_rounds"] == 2
    assert [sorted(draw) for draw in sampler.drawn] == [["q0", "q1"]] * 2
    assert found["filter_kept_share"] == 0.5  # two of four groups
    assert found["skipped_update"] == 0.0
