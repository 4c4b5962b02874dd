"""Workers of DeepSpeed and the plain engine: the same logprobs, gradients, updates, weights and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.engine import Objective, Training
from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.engine.plain import PlainEngine
from tasks.model import LoraConf, export_folder
from tasks.rl.losses import Normalizer
from tests.engine.test_plain import batch_of
from tests.tiny import make_method, make_model, optimizer

pytest.importorskip("deepspeed")
UNCLIPPED = replace(optimizer(), max_grad_norm=1e9)
TRAINING = Training(
    policy=UNCLIPPED, critic=UNCLIPPED, lora=LoraConf(), dtype="float32", keep_activations=True,
    needs_reference=True, seed=0,
)  # fmt: skip
EXACT = [[0, 3, 5], [1, 2, 4, 6]]
"""One micro-batch a worker: both engines add the same two gradients, and a + b = b + a."""
UNEVEN = [[0], [3, 5], [1], [2, 4], [6]]
"""Three for one worker and two for the other, whose third is empty; float32 rounds each sum."""


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Path:
    export_folder(make_model(tokenizer, kv_heads=2), tokenizer, tmp_path / "start")
    return tmp_path / "start"


def prepared(policy: Any, critic: Any, tokenizer: Any, plan: Any) -> tuple[Any, Any]:
    method, batch = make_method("ppo", tokenizer, entropy_coefficient=0.01), batch_of(7)
    old = policy.logprobs(batch, plan)
    values = critic.values(batch, plan) if critic is not None else None
    reference = policy.logprobs(batch, plan, reference=True)
    return method, method.advantage(replace(batch, old_logprobs=old - 0.1, ref_logprobs=reference, values=values))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("lora", [LoraConf(), LoraConf(rank=4)])
def test_updates_are_those_of_the_plain_engine(
    stage: Any, lora: LoraConf, start: Path, tokenizer: Any, tmp_path: Path
) -> None:
    training = replace(TRAINING, lora=lora)
    kind = DeepSpeedEngine(workers=2, stage=stage)
    torch.set_num_threads(1)
    with PlainEngine().open(start, training) as (plain, plain_critic), kind.open(start, training) as (policy, critic):
        assert critic is not None
        assert plain_critic is not None
        method, batch = prepared(plain, plain_critic, tokenizer, EXACT)
        sequences = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
        for found, wanted in zip(*(e.sequence_logprobs(sequences) for e in (policy, plain)), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        for number in range(5):
            for reference in (True, False):
                found, wanted = (e.logprobs(batch, EXACT, reference) for e in (policy, plain))
                assert torch.equal(found, wanted)
            assert torch.equal(critic.values(batch, EXACT), plain_critic.values(batch, EXACT))

            rows = [row for micro in EXACT for row in micro]
            objective = Objective(method.loss, Normalizer.of(batch.loss_mask[rows]), True, is_first=number == 0)
            ours, theirs = policy.update(batch, EXACT, objective), plain.update(batch, EXACT, objective)
            assert ours.metrics == theirs.metrics
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
            for objective in [Objective(method.value_loss, Normalizer.of(batch.response_mask[rows]))]:
                ours, theirs = critic.update(batch, EXACT, objective), plain_critic.update(batch, EXACT, objective)
                assert ours.metrics == theirs.metrics

        wanted_weights = {name: tensor.clone() for name, tensor in plain.weights()}
        for name, tensor in policy.weights():
            assert torch.equal(tensor, wanted_weights.pop(name)), name
        assert not wanted_weights
        for engine, folder in ((policy, "ours"), (plain, "theirs")):
            engine.save(tmp_path / folder)
            engine.export(tmp_path / f"{folder}-policy")
        for name in ("tensors.safetensors",):
            assert load_file(tmp_path / "ours" / name).keys() == load_file(tmp_path / "theirs" / name).keys()
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (tmp_path / "ours-policy" / name).read_bytes() == (tmp_path / "theirs-policy" / name).read_bytes()
