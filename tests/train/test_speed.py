"""What a run says of its speed and memory: counted by what was played and learned, and in no artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.clock import Clock
from tasks.flops import Decoder, Trained, critic_of, policy_of
from tasks.model import LoraConf
from tasks.train import resume
from tests.tiny import make_model, make_tokenizer, make_trainer
from tests.train.test_ahead import make

RATES = ("written", "prefilled", "trained", "read_in_learning")
METRICS = {f"tokens_per_s/{name}" for name in RATES} | {"flop_per_s/learning", "memory/stage_mb"}
OTHERS = {"memory/largest_worker_mb", "memory/sum_mb"}
"""Where the process of the tests has started others."""


def models(has_critic: bool) -> Trained:
    model = make_model(make_tokenizer())
    return Trained(policy_of(model, LoraConf()), critic_of(model) if has_critic else None)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_step_says_how_fast_it_was_and_no_artifact_does(algorithm: str, tmp_path: Path) -> None:
    steps: dict[int, dict[str, float]] = {}
    trainer = make_trainer(tmp_path, algorithm, epochs=2, log=lambda step, metrics: steps.update({step: metrics}))
    trainer.models = models(has_critic=algorithm == "ppo")
    progress = trainer.run()

    measured = ("tokens_per_s/", "flop_per_s/", "memory/")
    for step in range(1, 5):
        assert {name for name in steps[step] if name.startswith(measured)} - OTHERS == METRICS
        assert all(steps[step][name] > 0 for name in METRICS)
    assert {name for name in steps[0] if name.startswith(measured)} - OTHERS == {"memory/stage_mb"}
    assert not [name for row in progress.history for name in row["metrics"] if name.startswith(measured)]

    work = progress.work
    assert (work.written, work.prefilled) == (progress.cost.generated, progress.cost.prefilled)
    assert work.play_s == pytest.approx(progress.seconds["play"], abs=0.01)
    assert work.learn_s == pytest.approx(progress.seconds["learn"], abs=0.01)
    # Each of two epochs learns from every written token but the ends of texts, which are drawn and not kept.
    assert 0.8 * 2 * work.written < work.trained <= 2 * work.written
    assert work.flop > 6 * trainer.models.policy.body * work.read


def test_a_run_that_was_cut_counts_on_as_one_that_was_not(tmp_path: Path) -> None:
    class CutError(Exception):
        pass

    def cut(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise CutError

    whole = make_trainer(tmp_path / "whole").run()
    with pytest.raises(CutError):
        make_trainer(tmp_path / "cut", log=cut).run()
    resumed = make_trainer(tmp_path / "cut").run()
    counts = [(p.work.written, p.work.prefilled, p.work.trained, p.work.read) for p in (whole, resumed)]
    assert counts[0] == counts[1]
    assert whole == resumed


def test_seconds_of_a_step_that_was_played_ahead_are_those_of_its_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's clock counts only what it waited for, by which a second would hold too many tokens."""
    clocks: list[Clock] = []

    class Kept(Clock):
        def __init__(self) -> None:
            super().__init__()
            clocks.append(self)

    monkeypatch.setattr("tasks.train.ahead.Clock", Kept)
    trainer, _ = make(tmp_path)
    progress = trainer.run()
    assert len(clocks) == 4  # Of six steps; none is played ahead after a checkpoint.
    ahead = sum(clock.seconds["play"] for clock in clocks)
    assert ahead > 0
    alone = progress.work.play_s - ahead
    assert 0 < alone <= progress.seconds["play"] + 0.01
    assert progress.work.written == progress.cost.generated


def test_an_old_checkpoint_goes_on_without_counts_of_its_steps() -> None:
    """One that was written before work was counted has no such field."""
    adapter = resume._PROGRESS
    values: dict[str, Any] = adapter.dump_python(resume.Progress(step=3))
    del values["work"]
    assert adapter.validate_python(values) == resume.Progress(step=3)


def test_a_run_without_sizes_counts_no_operations(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    make_trainer(tmp_path, num_steps=1, log=lambda step, metrics: rows.append(metrics)).run()
    assert "tokens_per_s/trained" in rows[-1]
    assert "flop_per_s/learning" not in rows[-1]
    assert Trained(Decoder(1, 1, 1, 1, 1)).critic is None
