"""Engines and generators by configuration: what a run asks for is what it gets, and mistakes are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tasks import engine, generate
from tasks.engine import Engine, Training
from tasks.engine.plain import PlainEngine
from tasks.generate import Sampling
from tasks.model import LoraConf, export_folder
from tasks.stages.train import Learning, training_of
from tasks.store import DataError
from tests.engine.sharded import ShardedEngine
from tests.engine.test_plain import batch_of, whole
from tests.tiny import make_method, make_model, optimizer

ROOT = Path(__file__).parents[2]
TRAINING = Training(
    policy=optimizer(), critic=optimizer(), lora=LoraConf(), dtype="float32", keep_activations=True,
    needs_reference=True, seed=0,
)  # fmt: skip


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Path:
    export_folder(make_model(tokenizer), tokenizer, tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.parametrize("kind", [PlainEngine(), ShardedEngine()])
def test_an_engine_opens_a_folder(start: Path, kind: Engine, tmp_path: Path) -> None:
    batch = batch_of()
    with kind.open(start, TRAINING) as (policy, critic):
        assert critic is not None
        assert not critic.values(batch, whole(batch)).any()  # A critic begins at 0.
        assert torch.equal(policy.logprobs(batch, whole(batch)), policy.logprobs(batch, whole(batch), reference=True))
        policy.export(tmp_path / "out")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (start / name).read_bytes()
    with kind.open(start, replace(TRAINING, critic=None)) as (_, critic):
        assert critic is None
    with pytest.raises(DataError, match="the model folder is missing"), kind.open(start / "absent", TRAINING):
        raise AssertionError


def test_a_generator_shares_the_model_of_an_engine_that_has_it_here(start: Path) -> None:
    plain = generate.load("plain", ROOT)
    assert engine.load("plain", ROOT) == PlainEngine()
    with PlainEngine().open(start, TRAINING) as (policy, _), ShardedEngine().open(start, TRAINING) as (sharded, _):
        shared, copied, alone = plain.start(start, "float32", policy), plain.start(start, "float32", sharded), None
        assert (shared.shares_weights, copied.shares_weights) == (True, False)
        copied.update_weights(sharded.weights())
        alone = plain.start(start, "float32")
        played = [
            g.open([[1, 2, 3]], 2, Sampling(1.0, 1.0, (), 0), 30).generate([0, 1], [9, 9])
            for g in (shared, copied, alone)
        ]
        assert played[0] == played[1] == played[2]


@pytest.mark.parametrize(("room", "load"), [("engine", engine.load), ("generator", generate.load)])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: deep", r"conf/{room}/mine\.yaml: unknown kind 'deep': .* Known: .*plain"),
        ("workers: 2", r"conf/{room}/mine\.yaml: .*expected a mapping with key 'kind'"),
        ("kind: plain\nworkers: 2", r"conf/{room}/mine\.yaml: unknown key 'workers'"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, room: str, load: Any, text: str, words: str) -> None:
    (tmp_path / "conf" / room).mkdir(parents=True)
    (tmp_path / "conf" / room / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=words.format(room=room)) as caught:
        load("mine", tmp_path)
    assert "\n" not in str(caught.value)


def test_adapters_have_a_learning_rate_of_their_own(tokenizer: Any) -> None:
    method = make_method("ppo", tokenizer)
    settings = SimpleNamespace(
        policy=optimizer(lr=1e-6),
        critic=optimizer(lr=1e-5),
        dtype="float32",
        keep_activations=True,
        share_prefixes=False,
    )
    for lora, expected in ((LoraConf(rank=4, lr=3e-4), 3e-4), (LoraConf(rank=4), 1e-6), (LoraConf(), 1e-6)):
        training = training_of(7, cast(Learning, SimpleNamespace(train=settings, lora=lora)), method)
        assert (training.policy.lr, training.lora, training.seed) == (expected, lora, 7)
        assert training.critic is not None
        assert training.critic.lr == 1e-5
