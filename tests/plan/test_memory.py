"""The sums of a run's memory: golden values by hand, and the tensors that the engine and the generator really hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks import checkpoint
from tasks.agent.rollout import RolloutConf
from tasks.base.demonstrations import Example
from tasks.base.fit import PhaseConf, supervised_loss
from tasks.base.settings import FormatConf, TinyConf
from tasks.engine import OptimizerConf, Training
from tasks.engine.plain import PlainEngine
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.model import LoraConf, export_folder, stored_dtype
from tasks.plan import memory
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import Demand, Division, Learner, Served, Taught, phases
from tasks.plan.model_size import ModelSize, of_folder, of_tiny
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tasks.train.settings import TrainConf
from tests.tiny import make_learner

OPTIMIZER = OptimizerConf(1e-6, 0, (0.9, 0.999), 0.0, 1.0)
TRAIN = TrainConf(
    num_steps=1,
    prompts_per_step=512,
    rollouts_per_step=None,
    minibatches=1,
    epochs=1,
    max_batch_tokens=32_768,
    policy=OPTIMIZER,
    critic=OPTIMIZER,
    old_logprobs="trainer",
    dtype="auto",
    keep_activations=False,
    num_threads=1,
    checkpoint_every=1,
    validate_every=1,
    validate_questions=0,
    record_trajectories=0,
)
ROLLOUT = RolloutConf(4, 2048, 500, 500, 4096, 3, 2560)
H100 = Machine(Memory(128 * 10**9, "memory"), Memory(85_500_000_000, "GPU H100"), True, True)
VLLM = Served(0.5, 2**30)
QWEN_3B = ModelSize(2048, 11_008, 36, 151_936, 16, 2, 128, is_tied=True, num_weights=3_085_938_688)
PPO = Demand(QWEN_3B, H100, TRAIN, ROLLOUT, LoraConf(), Learner(True, True, False, 2560), None, VLLM)
GRPO = replace(PPO, learner=Learner(False, True, False, 2560))


def _items(demand: Demand, phase: str) -> dict[str, float]:
    """GB of the items on the GPU, to one place."""
    (found,) = (one for one in phases(demand) if one.name == phase)
    return {item.name: round(item.size / 1e9, 1) for item in found.items if item.place == "GPU"}


def test_sums_of_a_model_of_3_billion_weights() -> None:
    """12.3 GB are 4 bytes for each of 3,085,938,688 weights, without biases 3,085,828,096 by hand."""
    layer = 2048 * (2 * 2048 + 2 * 256 + 3 * 11_008 + 2)
    assert QWEN_3B.counted() == 151_936 * 2048 + 36 * layer + 2048 == 3_085_938_688 - 36 * (2048 + 2 * 256)
    states = {"policy: weights": 6.2, "policy: float32 copy": 12.3, "policy: Adam": 24.7, "reference": 6.2}
    assert _items(GRPO, "play") == {"CUDA": 1.0, **states, "vLLM": 42.8}
    update = _items(GRPO, "update")
    assert {name: update[name] for name in states} == states
    assert update["gradients"] == 12.3
    assert update["vLLM, asleep"] == 1.0


def test_activations_of_a_micro_batch_by_hand() -> None:
    """Inputs of 36 layers, 2048 numbers of 2 bytes a token, and twice one layer: 13.6 GB for 32,768 tokens."""
    norms = 2 * 2048 * (4 + 2 * 2)
    layer = norms + 2 * (3 * 2048 + 2 * 256 + 4 * 11_008)
    by_hand = 32_768 * (36 * 2048 * 2 + 2 * layer)
    assert _items(GRPO, "update")["activations of 32768 tokens"] == round(by_hand / 1e9, 1) == 13.6
    kept = replace(GRPO, train=replace(TRAIN, keep_activations=True))
    assert _items(kept, "update")["activations of 32768 tokens"] == round(32_768 * 37 * layer / 1e9, 1)


def test_a_critic_has_a_decoder_and_its_own_optimizer() -> None:
    critic = {name: size for name, size in _items(PPO, "play").items() if name.startswith("critic")}
    assert critic == {"critic: weights": 6.2, "critic: float32 copy": 12.3, "critic: Adam": 24.7}
    untied = replace(PPO, model=replace(QWEN_3B, is_tied=False, num_weights=3_397_103_616))
    assert _items(untied, "play")["critic: Adam"] == 24.7  # Without a head of 311 million weights.


def test_adapters_leave_the_weights_and_need_no_reference() -> None:
    lora = replace(GRPO, lora=LoraConf(rank=64))
    widths = (2048 + 2048) * 2 + (2048 + 256) * 2 + (2048 + 11_008) * 3
    assert QWEN_3B.adapters(LoraConf(rank=64)) == 36 * 64 * widths
    found = _items(lora, "play")
    assert found["policy: Adam"] == round(8 * 36 * 64 * widths / 1e9, 1) == 1.0
    assert "reference" not in found
    assert _items(lora, "checkpoint")["merged copy"] == 6.2


def test_keys_and_values_of_the_plain_generator() -> None:
    (item,) = (name for name in _items(replace(GRPO, vllm=None), "play") if name.startswith("keys and values"))
    assert item == "keys and values of 2560 rows of 4096 tokens"
    by_hand = 2560 * 4096 * 36 * 2 * 2 * 128 * 2
    assert _items(replace(GRPO, vllm=None), "play")[item] == round(by_hand / 1e9, 1) == 386.5


def test_a_machine_without_bfloat16_computes_in_float32() -> None:
    plain = replace(GRPO, machine=Machine(Memory(1, "memory")), vllm=None)
    (update,) = (one for one in phases(plain) if one.name == "update")
    names = {item.name: item.size for item in update.items}
    assert names["policy: weights"] == 4 * QWEN_3B.num_weights
    assert "policy: float32 copy" not in names
    assert {item.place for item in update.items} == {"memory"}


def test_a_start_policy_that_plays_is_a_second_generator() -> None:
    twice = replace(GRPO, learner=Learner(False, True, True, 2560))
    assert _items(twice, "update")["start policy that plays"] == 42.8


def test_a_generator_that_plays_while_a_step_is_learned_is_awake() -> None:
    assert _items(replace(GRPO, train=replace(TRAIN, play_ahead=True)), "update")["vLLM, which plays ahead"] == 42.8


@pytest.mark.parametrize("vllm", [VLLM, None])
def test_each_generator_of_a_fleet_has_weights_and_a_process(vllm: Served | None) -> None:
    here = replace(GRPO, machine=Machine(Memory(10**12, "memory"), host_has_bfloat16=True), vllm=vllm)

    def of(demand: Demand, phase: str) -> int:
        (found,) = (one for one in phases(demand) if one.name == phase)
        return found.size("memory")

    weights, process, compared = 2 * QWEN_3B.num_weights, 700_000_000, 4 * QWEN_3B.num_weights
    if vllm is None:  # The plain generator has the weights of the policy; each of a fleet has its own.
        assert of(replace(here, generators=4), "play") - of(here, "play") == 4 * (weights + process)
        return
    one, four = replace(here, generators=1), replace(here, generators=4)
    each = weights + 2**30 + 2_000_000_000 + process
    assert of(four, "play") - of(one, "play") == 3 * each
    assert of(four, "evaluation") - of(one, "evaluation") == 3 * (each + compared)


TINY = Qwen2Config(
    vocab_size=500,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model folder."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    export_folder(Qwen2ForCausalLM(TINY), tokenizer, path)
    return path


def _here(folder: Path, **changes: Any) -> Demand:
    """The demand of training that model on a CPU."""
    size = of_folder(folder)
    machine = Machine(Memory(10**9, "memory"), host_has_bfloat16=changes.pop("half", False))
    rollout = RolloutConf(1, 16, 8, 8, 40, 1, 6)
    return Demand(size, machine, TRAIN, rollout, LoraConf(), Learner(True, True, False, 6), None, None)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("half", [False, True])
def test_the_engine_holds_what_is_predicted_to_the_byte(folder: Path, half: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("tasks.model._cpu_has_bfloat16", lambda: half)
    training = Training(OPTIMIZER, OPTIMIZER, LoraConf(), "auto", True, True, 0)
    with PlainEngine().open(folder, training) as (policy, critic):
        assert critic is not None
        for trainee in (policy, critic):
            for weight in trainee.trained.values():
                weight.grad = torch.ones_like(weight)
            trainee.optimizer.step()

        computing = [p for m in (policy.module, critic.module, policy.reference) for p in m.parameters()]
        moments = [
            value
            for trainee in (policy, critic)
            for state in trainee.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        held = _bytes([*computing, *policy.trained.values(), *critic.trained.values(), *moments])
        head = critic.module["head"]

    demand = _here(folder, half=half)
    names = ("policy", "critic", "reference")
    predicted = [i.size for i in phases(demand)[1].items if i.name.startswith(names)]
    per_weight = 4 + 8  # The critic's head is no part of the sum; it is not rounded.
    assert held - per_weight * sum(p.numel() for p in head.parameters()) == sum(predicted)


def test_a_checkpoint_holds_what_is_predicted(folder: Path, tmp_path: Path) -> None:
    training = Training(OPTIMIZER, None, LoraConf(), "float32", True, False, 0)
    with PlainEngine().open(folder, training) as (policy, _):
        for weight in policy.trained.values():
            weight.grad = torch.ones_like(weight)
        policy.optimizer.step()
        policy.save(tmp_path / "policy")
    tensors, _ = checkpoint.read_state(tmp_path / "policy")
    moments = {name: t for name, t in tensors.items() if not name.endswith("/step")}
    demand = replace(_here(folder), learner=Learner(False, False, False, 6))
    (phase,) = (one for one in phases(demand) if one.name == "checkpoint")
    (copies,) = (item.size for item in phase.items if item.name == "copies of weights and moments")
    assert sum(t.nbytes for t in moments.values()) == copies


def test_the_cache_of_the_plain_generator_holds_what_is_predicted(folder: Path, tokenizer: Any) -> None:
    generator = PlainGenerator(Qwen2ForCausalLM(TINY).eval(), tokenizer)
    generator.eos_ids = frozenset()
    demand = _here(folder)
    assert demand.longest == 40  # 16 of the prompt, twice 8 written, 8 read.
    session = generator.open([[5] * 16] * 6, 1, Sampling(1.0, 1.0, (), 0), demand.longest)
    session.generate(range(6), [24] * 6)
    held = sum(buffer[:, :, :, : demand.longest].nbytes for buffer in session.cache.buffers if buffer is not None)
    (item,) = (one for one in phases(demand)[1].items if one.name.startswith("keys and values"))
    assert item.size == int(memory.HEAP_OF_CACHE * held)


@pytest.mark.parametrize("half", [False, True])
def test_a_backward_pass_keeps_about_what_is_predicted(folder: Path, half: bool, monkeypatch: Any) -> None:
    """The tensors that autograd keeps, each storage once; the layer that is worked on comes on top. Within 10%."""
    model = Qwen2ForCausalLM(TINY)
    monkeypatch.setattr("tasks.model._cpu_has_bfloat16", lambda: half)
    learner = make_learner(model, "bfloat16" if half else "float32")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = [Example((1,) * 127, (2,), (True,))] * 4
    with learner.reading(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        supervised_loss(model, rows)
    found = _bytes(tensor for pointer, tensor in kept.items() if pointer not in weights)

    size = of_folder(folder)
    scores = 127 if half else 0
    predicted = memory._activations(size, 4 * 127, 2 if half else 4, scores, keeps_all=True)
    assert found == pytest.approx(predicted * size.layers / (size.layers + 1), rel=0.1)


SMOL = ModelSize(576, 1536, 30, 49_152, 9, 3, 64, is_tied=True, num_weights=134_515_008, stored=538_090_408)
MEASURED = {"start policy": 13.75, "evaluation": 6.44}
"""GB at the peak of `peak_rss_mb`, SmolLM2-135M at scale small in bfloat16 on two cores, GRPO."""


@pytest.mark.parametrize("phase", MEASURED)
def test_measured_peaks_of_a_model_of_135_million_weights(phase: str) -> None:
    assert SMOL.counted() == SMOL.num_weights
    (found,) = (one.size("memory") for one in phases(_taught_at_scale_small()) if one.name == phase)
    assert 0.9 < found / 1e9 / MEASURED[phase] < 1.5


def test_where_instructions_are_read_once_a_batch_has_more_logits() -> None:
    """A call of 64 tokens after each of four searches and at the end; a row then has 512 tokens less to read."""
    sizes = []
    for share_reading in (False, True):
        (taught,) = (one for one in phases(_taught_at_scale_small(share_reading)) if one.name == "start policy")
        (logits,) = (item.size for item in taught.items if item.name == "logits")
        sizes.append(logits)
    assert sizes[1] / sizes[0] == pytest.approx(2048 / (2048 - 512))


def _taught_at_scale_small(share_reading: bool = False) -> Demand:
    small = replace(TRAIN, max_batch_tokens=2048, share_prefixes=True, keep_activations=True)
    fit = PhaseConf(64, 8, 5e-5, True, 0.0)
    teaching = FormatConf(2, "auto", 20, 2048, 2500, 0.3, 0.1, fit, share_reading=share_reading)
    machine = Machine(Memory(24 * 10**9, "memory"), host_has_bfloat16=True)
    rollout = RolloutConf(4, 512, 64, 384, 2048, 3, 64)
    return Demand(SMOL, machine, small, rollout, LoraConf(), Learner(False, True, False, 64), teaching, None)


def test_supervised_training_of_two_workers_by_hand() -> None:
    """N weights in bfloat16, divided by ZeRO-2 among two GPUs of a host, whose stage gathers a checkpoint."""
    count, bucket = QWEN_3B.num_weights, 2**26
    two, half = Division(2, 2, 2, False, bucket), QWEN_3B.num_weights // 2
    items = {
        item.name: (item.size, item.place)
        for item in memory.supervised(Taught("start policy", QWEN_3B, "auto", 4096, 1024), H100, two)
    }
    assert items.pop("activations of 4096 tokens")[1] == items.pop("logits")[1] == "GPU"
    assert items == {
        "weights in the stage": (4 * count, "memory"),
        "policy: weights": (2 * count, "GPU"),
        "policy: float32 copy": (4 * half, "GPU"),
        "policy: Adam": (8 * half, "GPU"),
        "gradients": (4 * (half + bucket), "GPU"),
        "copies of weights and moments": (12 * count, "memory"),
    }


def test_a_reward_model_has_float32_weights_rounded_ones_and_the_best_ones() -> None:
    """On a processor two workers hold what they do not divide twice."""
    here = Machine(Memory(10**12, "memory"), host_has_bfloat16=True)
    taught = Taught("reward model", SMOL, "auto", 2048, 1024, is_scored=True)
    alone, two = (
        {item.name: item.size / SMOL.num_weights for item in memory.supervised(taught, here, division)}
        for division in (None, Division(2, 2, 1, False, 2**26))
    )
    same = {"best weights": 4, "policy: Adam": 8}
    assert alone.items() >= (same | {"policy: weights": 4, "gradients": 4, "rounded weights": 2}).items()
    assert two.items() >= (same | {"policy: weights": 8, "gradients": 8, "rounded weights": 4}).items()
    assert two["activations of 2048 tokens"] == pytest.approx(2 * alone["activations of 2048 tokens"])


def test_a_tiny_policy_is_counted_as_it_is_made() -> None:
    tiny = TinyConf(64, 3, 4, 160, 128, 500, 0.05)
    model = Qwen2ForCausalLM(Qwen2Config(**{**TINY.to_dict(), "num_key_value_heads": 4}))
    biases = sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
    assert of_tiny(tiny).num_weights == sum(p.numel() for p in model.parameters()) - biases


def test_a_folder_is_counted_by_its_files(folder: Path) -> None:
    size = of_folder(folder)
    assert size.num_weights == sum(p.numel() for p in Qwen2ForCausalLM(TINY).parameters())
    assert (size.kv_heads, size.head_dim, size.is_tied) == (2, 16, True)


def test_the_dtype_of_a_folder_is_that_of_all_its_weights(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    assert stored_dtype(folder) == torch.float32
    model = Qwen2ForCausalLM(TINY).to(torch.bfloat16)
    export_folder(model, tokenizer, tmp_path / "half")
    assert stored_dtype(tmp_path / "half") == torch.bfloat16
    model.model.norm.float()
    export_folder(model, tokenizer, tmp_path / "mixed")
    assert stored_dtype(tmp_path / "mixed") == torch.float32


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_workers_divide_a_model_of_3_billion_weights(stage: Any) -> None:
    """Eight GPUs of one host, by hand: an eighth of 12.3 GB is 1.5."""
    division = Division(8, 8, stage, offload=False, bucket=2**26)
    found = _items(replace(PPO, division=division), "play")
    weights = {1: 6.2, 2: 6.2, 3: 0.8}[stage]
    states = {
        f"{name}: {what}": size
        for name in ("policy", "critic")
        for what, size in (("float32 copy", 1.5), ("Adam", 3.1))
    }
    gradients = {"policy: gradients": 1.8, "critic: gradients": 1.8} if stage == 3 else {}
    whole = {"policy: weights": weights, "critic: weights": weights, "reference": weights}
    assert found == {"CUDA": 1.0, **whole, **states, **gradients, "vLLM": 42.8}
    update = _items(replace(PPO, division=division), "update")
    assert update["gradients"] == {1: 12.3, 2: 1.8, 3: 0.0}[stage]


def test_states_that_are_offloaded_lie_in_the_memory_of_the_host() -> None:
    offloaded = replace(PPO, division=Division(8, 8, 2, offload=True, bucket=2**26))
    assert "policy: Adam" not in _items(offloaded, "play")
    (play,) = (one for one in phases(offloaded) if one.name == "play")
    of_host = {item.name: item.size for item in play.items if item.place == "memory"}
    assert of_host["policy: Adam"] == pytest.approx(8 * QWEN_3B.num_weights, abs=64)
    assert of_host["Python and its libraries"] == 9 * memory.PROCESS
