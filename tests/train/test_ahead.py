"""One step off: which weights play a step, and that killed and repeated runs are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.generate.plain import PlainGenerator
from tasks.retrieval import RetrievalError
from tasks.train.health import CollapseConf
from tasks.train.loop import Trainer
from tests.tiny import make_model, make_trainer


class Apart(PlainGenerator):
    """A generator with weights of its own, which remembers the first weight of each session."""

    plays_apart = True

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(make_model(tokenizer), tokenizer)
        self.played: list[float] = []

    def open(self, *arguments: Any) -> Any:
        self.played.append(first_weight(self.model))
        return super().open(*arguments)


def first_weight(model: Any) -> float:
    return float(next(model.parameters()).detach().flatten()[0])


def make(scratch: Path, log: Any = lambda step, metrics: None, **changes: Any) -> tuple[Trainer, Apart]:
    ahead = {"play_ahead": True, "num_steps": 6, "checkpoint_every": 4, "validate_every": 100} | changes
    trainer = make_trainer(scratch, share=False, log=log, **ahead)
    generator = Apart(trainer.player.tokenizer)
    trainer.generator = trainer.player.generator = trainer.validator.generator = generator
    return trainer, generator


def test_a_step_plays_with_the_weights_before_the_one_that_is_learned(tmp_path: Path) -> None:
    after = {}
    rows = []
    trainer, generator = make(tmp_path, lambda step, metrics: rows.append((step, metrics)))
    learn = trainer.policy.update

    def learned(*arguments: Any) -> Any:
        report = learn(*arguments)
        after[len(after) + 1] = first_weight(trainer.policy.causal_lm)
        return report

    trainer.policy.update = learned  # type: ignore[method-assign]
    before = first_weight(trainer.policy.causal_lm)
    trainer.run()

    of_steps = [before, before, after[1], after[2], after[4], after[4]]
    assert len(set(of_steps)) == 4
    validations = [before, after[6]]
    assert generator.played == [validations[0], *of_steps, validations[1]]
    steps = {step: metrics for step, metrics in rows if step}
    assert [steps[step]["weights_behind"] for step in sorted(steps)] == [0, 1, 1, 1, 0, 1]
    # Sampled by other weights than those that learn: the distance is no longer a rounding error.
    assert all((steps[step]["logprob_gap_max"] > 1e-3) == (step in (2, 3, 4, 6)) for step in steps)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.weights()}


class CutError(Exception):
    """The run is cut."""


@pytest.mark.parametrize("cut", [3, 4, 5])
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(cut: int, tmp_path: Path) -> None:
    whole, _ = make(tmp_path / "whole")
    progress = whole.run()

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == cut:
            raise CutError

    with pytest.raises(CutError):
        make(tmp_path / "cut", stop)[0].run()
    resumed, _ = make(tmp_path / "cut")
    again = resumed.run()
    assert again == progress
    wanted = weights(whole)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(resumed).items())


def test_counts_are_those_of_the_steps_that_were_learned(tmp_path: Path) -> None:
    """No step is counted twice, and none before it is taken."""
    totals = []
    trainer, _ = make(tmp_path, lambda step, metrics: totals.append(metrics.get("generated_tokens_total", 0)))
    progress = trainer.run()
    assert all(0 < later - earlier <= 16 * 12 for earlier, later in pairwise(totals))
    assert totals[-1] == progress.cost.generated
    assert (progress.num_draws, progress.num_trajectories) == (6, 6 * 16)


class Failing:
    """A sampler whose draw number `which` fails."""

    def __init__(self, sampler: Any, which: int) -> None:
        self.sampler, self.which, self.count = sampler, which, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def draw(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count == self.which:
            raise RetrievalError("the index is away")
        return self.sampler.draw(*arguments)


def test_a_search_that_fails_while_a_step_is_learned_ends_the_run_with_the_next_step(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    trainer.method = replace(trainer.method, sampler=Failing(trainer.method.sampler, 3))
    with pytest.raises(RetrievalError, match="the index is away"):
        trainer.run()
    assert trainer.progress.step == 2


def test_a_run_that_is_stopped_forgets_what_it_plays(tmp_path: Path) -> None:
    rules = CollapseConf(2, 0.9, None, None, None)
    trainer, generator = make(tmp_path, collapse=rules)
    progress = trainer.run()
    assert progress.stopped is not None
    assert progress.num_draws == progress.step
    assert generator.played[-1] == first_weight(trainer.policy.causal_lm)


def test_a_generator_in_this_process_cannot_play_ahead(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train: play_ahead with PlainGenerator=True: expected false, or a generator"):
        make_trainer(tmp_path, share=False, play_ahead=True).run()
