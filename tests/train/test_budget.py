"""When a run goes on and when it ends: refilled groups, token budget, collapse, and the policy that is handed on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.engine import DivergedError
from tasks.generate.plain import PlainGenerator
from tasks.rewards import on_last_token
from tasks.rl.advantages.constant import ConstantAdvantage
from tasks.rl.filters.mixed_outcomes import MixedOutcomes
from tasks.rl.filters.successful import Successful
from tasks.rl.losses import LossSum
from tasks.rl.losses.imitation import Imitation
from tasks.rl.samplers.gold_answers import GoldAnswers
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.train.health import CollapseConf
from tasks.train.loop import Trainer
from tasks.train.update import Learner
from tasks.types import Action, Scores, Trajectory, Turn
from tests.tiny import EvenFirst, Shelf, make_model, make_player, make_tokenizer, make_trainer

IMITATION = LossSum((Imitation(),))
OFF: dict[str, Any] = {
    "patience": 2, "min_valid_action_rate": None, "max_approx_kl": None, "max_validation_drop": None,
    "max_skipped": None,
}  # fmt: skip


def collapse(**changes: Any) -> CollapseConf:
    return CollapseConf(**(OFF | changes))


def steps_of(trainer: Trainer) -> list[dict[str, float]]:
    return [row["metrics"] for row in trainer.progress.history if row["step"]]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]


def filtered(scratch: Path, rounds: int = 4, **changes: Any) -> Trainer:
    """GRPO of groups of four on the bandit, mixed groups only."""
    trainer = make_trainer(scratch, **changes)
    trainer.method = replace(trainer.method, filter=MixedOutcomes("em", rounds))
    return trainer


@dataclass(frozen=True)
class Same:
    """1 for every trajectory: no group is mixed."""

    reads: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    components: tuple[str, ...] = ("em",)

    def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
        return [on_last_token(t, 1.0, em=1.0) for t in trajectories]


# Refill -----------------------------------------------------------------------------------------------------------


def test_a_refilling_run_that_is_cut_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = filtered(tmp_path / "whole", num_steps=5, rollouts_per_step=8, checkpoint_every=1)
    whole.run()
    for stop in (2, 4):
        filtered(tmp_path / "cut", num_steps=stop, rollouts_per_step=8, checkpoint_every=1).run()
    cut = filtered(tmp_path / "cut", num_steps=5, rollouts_per_step=8, checkpoint_every=1)
    cut.run()
    assert steps_of(cut)[-1] == steps_of(whole)[-1]
    assert cut.progress.num_draws == whole.progress.num_draws
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(cut)[name]), name


def test_no_group_survives_the_update_is_skipped_and_after_so_many_the_run_stops(tmp_path: Path) -> None:
    trainer = filtered(tmp_path, rounds=2, rewards=(Same(),), num_steps=9, collapse=collapse(max_skipped=3))
    before = weights_of(trainer)
    trainer.run()
    assert trainer.progress.step == 3
    assert trainer.progress.stopped == "3 updates in a row were skipped: too few groups were left to learn from"
    assert all(metrics["skipped_update"] == 1.0 and "loss" not in metrics for metrics in steps_of(trainer))
    assert all(metrics["filter_kept_share"] == 0 and metrics["sampling_rounds"] == 2 for metrics in steps_of(trainer))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items())
    again = filtered(tmp_path, rounds=2, rewards=(Same(),), num_steps=9, collapse=collapse(max_skipped=3))
    assert again.run().step == 3  # A run that was stopped stays stopped.


# Budget, selection, collapse --------------------------------------------------------------------------------------


def test_a_run_ends_with_the_step_that_spends_the_token_budget(tmp_path: Path) -> None:
    free = make_trainer(tmp_path / "free", num_steps=5, rollouts_per_step=8)
    free.run()
    totals = [metrics["generated_tokens_total"] for metrics in steps_of(free)]
    bound = make_trainer(tmp_path / "bound", num_steps=5, rollouts_per_step=8, max_generated_tokens=int(totals[2]))
    bound.run()
    assert bound.progress.step == 3
    assert "validation_em" in steps_of(bound)[-1]
    more = make_trainer(tmp_path / "bound", num_steps=5, rollouts_per_step=8, max_generated_tokens=0)
    more.run()  # A run may be made longer.
    assert [m["reward_mean"] for m in steps_of(more)] == [m["reward_mean"] for m in steps_of(free)]


def test_the_budget_ends_the_refill_of_a_step_too(tmp_path: Path) -> None:
    free = filtered(tmp_path / "free", rounds=6, rewards=(Same(),), num_steps=1, collapse=collapse(max_skipped=5))
    free.run()
    total = steps_of(free)[0]["generated_tokens_total"]
    assert steps_of(free)[0]["sampling_rounds"] == 6
    bound = filtered(
        tmp_path / "bound", rounds=6, rewards=(Same(),), num_steps=9, max_generated_tokens=int(total / 3),
        collapse=collapse(max_skipped=5),
    )  # fmt: skip
    bound.run()
    assert bound.progress.step == 1
    assert steps_of(bound)[0]["sampling_rounds"] < 6
    assert total / 3 <= steps_of(bound)[0]["generated_tokens_total"] < 2 * total / 3


def test_validation_by_tokens_does_not_ask_how_many_steps_they_took(tmp_path: Path) -> None:
    free = make_trainer(tmp_path / "free", num_steps=6, rollouts_per_step=8)
    free.run()
    totals = [int(metrics["generated_tokens_total"]) for metrics in steps_of(free)]
    every = totals[-1] // 3 + 1
    due = [i for i, total in enumerate(totals) if total // every > ([0, *totals][i] // every)]
    assert 0 < len(due) < 6
    trainer = make_trainer(tmp_path / "tokens", num_steps=6, rollouts_per_step=8, validate_every_tokens=every)
    trainer.run()
    assert [i for i, metrics in enumerate(steps_of(trainer)) if "validation_em" in metrics] == sorted({*due, 5})


def graded(trainer: Trainer, shares: list[float]) -> list[dict[str, torch.Tensor]]:
    """Let the k-th validation find this share of right answers; returns the weights at each."""
    seen: list[dict[str, torch.Tensor]] = []
    left = iter(shares)

    def play(questions: Any, *_: Any) -> list[Trajectory]:
        seen.append(weights_of(trainer))
        share = next(left)
        turn = Turn(Action("answer"), 0, 1, 1)
        answers = [q.answers[0] if i < share * len(questions) else "wrong" for i, q in enumerate(questions)]
        return [Trajectory("q", "g", (1,), (2,), (True,), (0.0,), (turn,), "answered", one) for one in answers]

    trainer.validator.play = play  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize(
    ("shares", "best"),
    [([0.25, 0.75, 0.5], 1), ([0.75, 0.5, 0.25], 0), ([0.25, 0.5, 0.5], 2)],  # Of equal ones the latest.
)
def test_the_best_policy_by_validation_is_handed_on(tmp_path: Path, shares: list[float], best: int) -> None:
    trainer = make_trainer(tmp_path / "run", num_steps=4, select="best")
    seen = graded(trainer, shares)
    trainer.run()
    assert trainer.progress.selected_step == 2 * best
    trainer.export(tmp_path / "out")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(kept[name], seen[best][name])
    assert [torch.equal(kept[name], other[name]) for other in seen] == [i == best for i in range(3)]
    again = make_trainer(tmp_path / "run", num_steps=4, select="best")
    again.run()  # Nothing is left to do; what it selected is known.
    again.export(tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], kept[name])


def test_the_last_policy_is_handed_on_where_that_is_asked(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", num_steps=4, select="last")
    seen = graded(trainer, [0.75, 0.5, 0.25])
    trainer.run()
    trainer.export(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], seen[2][name])


def test_a_run_whose_validation_falls_stops_and_hands_on_its_best(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", num_steps=20, select="best", collapse=collapse(max_validation_drop=0.5))
    seen = graded(trainer, [0.5, 1.0, 0.25, 0.0, 1.0])
    trainer.run()
    assert trainer.progress.stopped == "validation EM fell from 1.000 to 0.250 and 0.000"
    assert (trainer.progress.step, trainer.progress.selected_step) == (6, 2)
    trainer.export(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], seen[1][name])


def test_a_run_that_stops_between_validations_is_validated_where_it_ends(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, num_steps=20, select="best", validate_every=50, collapse=collapse(min_valid_action_rate=0.99)
    )
    graded(trainer, [0.5, 0.25])
    trainer.run()
    assert trainer.progress.stopped == "valid_action_rate was below 0.99 for 2 steps"
    assert [row["step"] for row in trainer.progress.history if "validation_em" in row["metrics"]] == [0, 2]
    assert trainer.progress.selected_step == 0


def test_gradients_that_are_not_finite_stop_the_run_where_collapse_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge() -> float:
        raise DivergedError("the gradient norm is nan after 7 updates. Lower the learning rate.")

    watched = make_trainer(tmp_path / "watched", num_steps=4, select="best", collapse=collapse())
    monkeypatch.setattr(watched.policy, "step", diverge)
    watched.run()
    assert watched.progress.stopped == "the gradient norm is nan after 7 updates. Lower the learning rate."
    watched.export(tmp_path / "out")
    free = make_trainer(tmp_path / "free", num_steps=4)
    monkeypatch.setattr(free.policy, "step", diverge)
    with pytest.raises(DivergedError):
        free.run()


# Samplers without a policy of this run ------------------------------------------------------------------------------


def test_rejection_sampling_plays_the_start_policy_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, num_steps=4)
    trainer.method = replace(
        trainer.method, sampler=IndependentGroup(4, from_start=True), filter=Successful("em"), loss=IMITATION,
        advantage=ConstantAdvantage(),
    )  # fmt: skip
    tokenizer = make_tokenizer()
    start = make_model(tokenizer)
    trainer.player = make_player(
        PlainGenerator(start, tokenizer, False), tokenizer, Shelf(), max_turns=1, max_call_tokens=6
    )
    before = {name: p.detach().clone() for name, p in start.named_parameters()}
    learned: list[Any] = []
    learn = Learner.learn

    def watched(*args: Any) -> Any:
        experience, metrics = learn(*args)
        learned.append(experience)
        return experience, metrics

    monkeypatch.setattr(Learner, "learn", watched)
    trainer.run()
    assert all(torch.equal(p, before[name]) for name, p in start.named_parameters())
    moved = [not torch.equal(p, before[name]) for name, p in weights_of(trainer).items()]
    assert all(moved)
    assert learned
    assert all(bool((experience.rewards.sum(-1) == 1).all()) for experience in learned)


def test_supervised_steps_raise_the_likelihood_of_the_gold_answer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_steps=8, rewards=(EvenFirst(),))
    trainer.method = replace(trainer.method, sampler=GoldAnswers(), loss=IMITATION, advantage=ConstantAdvantage())
    trainer.run()
    losses = [metrics["loss"] for metrics in steps_of(trainer)]
    assert losses[-1] < 0.7 * losses[0]
    assert steps_of(trainer)[-1]["generated_tokens_total"] == 0
    assert "logprob_gap_max" not in steps_of(trainer)[-1]
