"""A generator that loses its weights while it sleeps: the loop never plays with what is left of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.engine import DivergedError
from tasks.generate import WeightsError
from tasks.generate.plain import PlainGenerator
from tasks.train.health import CollapseConf
from tasks.train.loop import Trainer
from tests.tiny import make_model, make_player, make_trainer

COLLAPSE = CollapseConf(9, min_valid_action_rate=None, max_approx_kl=None, max_validation_drop=None, max_skipped=None)


class Forgetful(PlainGenerator):
    """Its own copy of the policy turns to nan when it sleeps; it counts what is asked of it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.events: list[str] = []
        self.is_awake = self.has_weights = True

    def open(self, *args: Any) -> Any:
        if not (self.is_awake and self.has_weights):
            raise WeightsError("asleep, or without weights")
        self.events.append("open")
        return super().open(*args)

    def sleep(self) -> None:
        self.events.append("sleep")
        self.is_awake = self.has_weights = False
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def wake(self) -> None:
        self.is_awake = True

    def update_weights(self, weights: Iterable[Any]) -> None:
        assert self.is_awake
        super().update_weights(weights)
        self.events.append("update")
        self.has_weights = True


def forgetful(scratch: Path, **changes: Any) -> tuple[Trainer, Forgetful]:
    trainer = make_trainer(scratch, share=False, **changes)
    tokenizer = trainer.player.tokenizer
    generator = trainer.generator = Forgetful(make_model(tokenizer), tokenizer)
    for name in ("player", "validator"):
        player = make_player(generator, tokenizer, getattr(trainer, name).retriever, max_turns=1, max_call_tokens=6)
        setattr(trainer, name, player)
    return trainer, generator


def test_it_sleeps_while_the_policy_learns_and_plays_what_a_shared_model_plays(tmp_path: Path) -> None:
    trainer, generator = forgetful(tmp_path / "sleeping", num_steps=2)
    trainer.run()
    assert generator.events == ["open", *("open", "sleep", "update") * 2, "open"]
    shared = make_trainer(tmp_path / "shared", num_steps=2)
    shared.run()
    assert trainer.progress.history == shared.progress.history


def test_after_an_update_that_diverged_it_plays_the_policy_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, generator = forgetful(tmp_path, num_steps=3, collapse=COLLAPSE)

    def diverge(*_: Any) -> Any:
        raise DivergedError("the gradient is not finite")

    monkeypatch.setattr(trainer.policy, "update", diverge)
    assert trainer.run().stopped == "the gradient is not finite"
    assert generator.events == ["open", "open", "sleep", "update", "open"]
    weights = dict(trainer.policy.weights())
    assert all(torch.equal(p, weights[name]) for name, p in generator.model.named_parameters())


def test_a_run_that_goes_on_gives_it_the_weights_first(tmp_path: Path) -> None:
    forgetful(tmp_path, num_steps=2)[0].run()
    trainer, generator = forgetful(tmp_path, num_steps=3)
    trainer.run()
    assert generator.events[:2] == ["update", "open"]
