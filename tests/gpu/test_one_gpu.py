"""One GPU does what the processor does: `make test ARGS="tests/gpu -s"` where there is one. Nothing is downloaded.

Each test compares the GPU with the same computation on the processor, with another way on the GPU, or with what the
project says of it before a run. docs/model.md says what the suite prints and where it ran.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.agent.rollout import RolloutConf
from tasks.engine import LOGIT_CHUNK, Objective, OptimizerConf, Training
from tasks.engine.plain import PlainEngine, PlainPolicy
from tasks.generate import Sampling
from tasks.generate.plain import PlainConf, PlainGenerator
from tasks.model import LoraConf, export_folder
from tasks.plan import machine, memory
from tasks.plan.memory import Demand, Learner
from tasks.plan.model_size import of_folder
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tasks.rl.experience import Experience, collate, microbatches, shared_microbatches
from tasks.rl.losses import Normalizer
from tasks.rl.samples import whole_trajectories
from tasks.train.settings import TrainConf
from tasks.types import Scores, Trajectory
from tests.tiny import make_model, make_policy, make_tokenizer, optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]
CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
PROMPTS = [[7 * i + j for j in range(5 + 3 * i)] for i in range(6)]


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """Products of float32 in float32: the default of torch, which some environment may have changed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def _trajectory(number: int, prompt: int, length: int, vocab: int = 256) -> Trajectory:
    """A question in common by two, then text of its own; every third token comes from a search."""
    group = number // 2
    prefix = tuple((37 * group + 11 * i) % vocab for i in range(prompt))
    response = tuple((53 * number + 13 * i + 5) % vocab for i in range(length))
    mask = tuple(i % 3 != 1 for i in range(length))
    return Trajectory(f"q{number}", f"g{group}", prefix, response, mask, (0.0,) * length, (), "open")


def _batch(count: int = 8, prompt: int = 9, longest: int = 20, vocab: int = 256) -> Experience:
    rows = [_trajectory(i, prompt, longest - i % 5, vocab) for i in range(count)]
    scores = [Scores(float(i % 2), ((row.last_generated, float(i % 2)),)) for i, row in enumerate(rows)]
    return collate(whole_trajectories(rows), scores)


def _loss(_batch: Any, logprobs: Tensor, entropy: Tensor, _normalizer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    weights = torch.linspace(0.5, 2, logprobs.shape[1], device=logprobs.device)
    loss = -(weights * logprobs).sum() / logprobs.numel() - 0.01 * entropy.mean()
    return loss, {"loss": loss.detach()}


def _plan(batch: Experience, tokens: int, sharing: Any = False) -> list[list[int]]:
    """Micro-batches of every row."""
    if sharing:
        return shared_microbatches(batch, range(len(batch)), tokens, sharing == "longest")
    return microbatches(batch.lengths.tolist(), range(len(batch)), tokens)


def _update(policy: PlainPolicy, batch: Experience, plan: Any, steps: int = 1) -> list[float]:
    objective = Objective(_loss, Normalizer.of(batch.loss_mask))
    return [policy.update(batch, plan, objective).grad_norm for _ in range(steps)]


def _policy(device: torch.device, dtype: str = "float32", **more: Any) -> PlainPolicy:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, sharpness=2.0, kv_heads=2).to(device)
    return make_policy(model, tokenizer, dtype=dtype, **more)


def _weights(policy: PlainPolicy) -> dict[str, Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in policy.weights()}


def _farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("sharing", [False, True, "longest"])
def test_logprobs_are_those_of_the_processor(sharing: Any) -> None:
    batch = _batch()
    plan = _plan(batch, 120, sharing)
    there = _policy(CUDA, share_prefixes=sharing).logprobs(batch, plan).cpu()
    here = _policy(torch.device("cpu")).logprobs(batch, plan)
    torch.testing.assert_close(there, here, rtol=0, atol=2e-4)


@pytest.mark.parametrize("sharing", [False, "longest"])
@pytest.mark.parametrize("rank", [0, 4])
def test_three_updates_are_those_of_the_processor(sharing: Any, rank: int) -> None:
    """SGD-like AdamW: an eps that is not small against the gradients, so that rounding is not blown up."""
    batch, found = _batch(), []
    for device in (CUDA, torch.device("cpu")):
        policy = _policy(device, rank=rank, share_prefixes=sharing, conf=optimizer(lr=1e-3))
        for group in policy.optimizer.param_groups:
            group["eps"] = 1e-2
        plan = _plan(batch, 120, sharing)
        norms = _update(policy, batch, plan, 3)
        found.append((_weights(policy), norms))
    (there, norms), (here, expected) = found
    assert norms == pytest.approx(expected, rel=2e-3)
    start = _weights(_policy(torch.device("cpu")))
    moved, apart = _farthest(here, start), _farthest(there, here)
    assert moved > 1e-5
    assert apart < 0.02 * moved


def test_bfloat16_is_near_float32_and_tiny_steps_add_up() -> None:
    batch = _batch()
    plan = _plan(batch, 400)
    half, full = _policy(CUDA, "bfloat16", conf=optimizer(lr=1e-6)), _policy(CUDA)
    apart = (half.logprobs(batch, plan).cpu() - full.logprobs(batch, plan).cpu()).abs()
    assert 0 < float(apart.max()) < 0.3
    before = {name: tensor.detach().clone() for name, tensor in half.trained.items()}
    _update(half, batch, plan, 4)
    assert all(tensor.dtype == torch.float32 for tensor in half.trained.values())
    moved = [float((tensor.detach() - before[name]).abs().max()) for name, tensor in half.trained.items()]
    assert min(moved) > 1e-6  # Steps far below what bfloat16 tells apart are kept in the float32 copy.


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_the_trainer_reads_what_the_generator_wrote(dtype: str, bound: float) -> None:
    """The ratio of a policy that has not moved is 1, up to the rounding of the type."""
    policy = _policy(CUDA, dtype)
    generator = PlainGenerator(policy.causal_lm, policy.tokenizer, shares_weights=True)
    session = generator.open(PROMPTS, 4, Sampling(1.0, 1.0, (), 3), 100)
    rows = list(range(len(PROMPTS) * 4))
    calls = session.generate(rows, [30] * len(rows))
    sequences = [[*PROMPTS[row // 4], *call.token_ids] for row, call in zip(rows, calls, strict=True)]
    read = policy.sequence_logprobs(sequences)
    apart = [
        abs(there - written)
        for row, (call, whole) in enumerate(zip(calls, read, strict=True))
        for there, written in zip(whole[len(PROMPTS[row // 4]) - 1 :], call.logprobs, strict=True)
    ]
    assert len(apart) > 300
    assert max(apart) < bound
    assert sum(apart) / len(apart) < bound / 10


def test_greedy_play_is_that_of_the_processor_and_a_draw_repeats() -> None:
    tokenizer = make_tokenizer()
    here = make_model(tokenizer, kv_heads=2)
    there = copy.deepcopy(here).to(CUDA)

    def play(model: Any, temperature: float) -> list[tuple[int, ...]]:
        session = PlainGenerator(model, tokenizer).open(PROMPTS, 2, Sampling(temperature, 1.0, (), 3), 80)
        return [call.token_ids for call in session.generate(list(range(12)), [24] * 12)]

    assert play(there, 0.0) == play(here, 0.0)
    assert play(there, 1.0) == play(there, 1.0)
    assert len(set(play(there, 1.0))) > 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_activations_change_little_and_take_less(dtype: str) -> None:
    batch = _batch(32, 40, 160)
    plan = [list(range(len(batch)))]
    peaks, gradients = [], []
    for keeps in (True, False):
        policy = _policy(CUDA, dtype, keep_activations=keeps)
        policy.accumulate(batch, plan[0], Objective(_loss, Normalizer.of(batch.loss_mask)))  # Loads the kernels.
        policy.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        policy.accumulate(batch, plan[0], Objective(_loss, Normalizer.of(batch.loss_mask)))
        peaks.append(torch.cuda.max_memory_allocated() - held)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained.values() if p.grad is not None]))
    assert peaks[1] < peaks[0]
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-2


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    batch = _batch()
    plan = _plan(batch, 120)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        policy = _policy(CUDA, "bfloat16")
        _update(policy, batch, plan, 2)
        (tmp_path / "state").mkdir()
        policy.save(tmp_path / "state")
        other = _policy(CUDA, "bfloat16")
        other.load(tmp_path / "state")
        assert _farthest(_weights(other), _weights(policy)) == 0
        _update(policy, batch, plan, 2)
        _update(other, batch, plan, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert _farthest(_weights(other), _weights(policy)) < 1e-6


def _folder(tmp_path: Path, hidden: int, layers: int) -> Path:
    """A Qwen2.5-shaped model with random weights and the tokenizer of the tests."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), intermediate_size=4 * hidden, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "model"
    export_folder(Qwen2ForCausalLM(config).to(torch.bfloat16), tokenizer, folder)
    return folder


ADAMW = OptimizerConf(1e-6, 0, (0.9, 0.999), 0.0, 1.0)


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("keeps", [False, True])
def test_memory_is_what_the_plan_foretells(tmp_path: Path, keeps: bool, rank: int) -> None:
    """Play and update of a model of 110 million weights at the longest rows that its budgets allow.

    The peak is at most what the plan says, and at least 0.4 of it, so that the plan turns away little that fits.
    """
    folder, lora = _folder(tmp_path, 768, 12), LoraConf(rank=rank)
    prompt, total, rows, tokens = 512, 2048, 16, 8192
    rollout = RolloutConf(3, prompt, 128, 384, total, 3, rows)
    train = TrainConf(
        num_steps=1, prompts_per_step=4, rollouts_per_step=None, minibatches=1, epochs=1, max_batch_tokens=tokens,
        policy=ADAMW, critic=ADAMW, old_logprobs="trainer", dtype="bfloat16", keep_activations=keeps, num_threads=1,
        checkpoint_every=1, validate_every=1, validate_questions=0, record_trajectories=0,
    )  # fmt: skip
    demand = Demand(of_folder(folder), machine.this_machine(), train, rollout, lora,
                    Learner(False, True, False, rows), None, None)  # fmt: skip
    foretold = {phase.name: phase.size("GPU") - memory.GPU_PROCESS for phase in memory.phases(demand)}

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    training = Training(ADAMW, None, lora, "bfloat16", keeps, True, 0, "longest")
    measured = {}
    with PlainEngine().open(folder, training) as (policy, _):
        generator = PlainConf().start(folder, "bfloat16", policy)
        for phase in ("play", "update"):
            torch.cuda.reset_peak_memory_stats()
            if phase == "play":
                session = generator.open([[9] * prompt] * (rows // 4), 4, Sampling(1.0, 1.0, (), 0), total)
                for _ in range(3):
                    session.generate(list(range(rows)), [128] * rows)
                    session.append(list(range(rows)), [[11] * 384] * rows)
                del session
            else:
                batch = _batch(tokens // total, prompt, total - prompt, 32_000)
                plan = [list(range(len(batch)))]
                policy.logprobs(batch, plan, reference=True)
                _update(policy, batch, plan, 2)
            measured[phase] = torch.cuda.max_memory_allocated() - before
    told = {phase: f"{size / 1e9:.2f} GB of {foretold[phase] / 1e9:.2f}" for phase, size in measured.items()}
    print(f"keeps_activations={keeps} rank={rank}: {told}")
    for phase, size in measured.items():
        assert size <= foretold[phase], told
        assert size >= 0.4 * foretold[phase], told


def test_long_heads_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of the largest chunk and that of one token at a time give the same log-probabilities and norms."""
    batch, found = _batch(), []
    plan = _plan(batch, 400)
    for chunk in (2**28, 420 * 7):
        monkeypatch.setitem(LOGIT_CHUNK, "cuda", chunk)
        policy = _policy(CUDA)
        found.append((policy.logprobs(batch, plan).cpu(), _update(policy, batch, plan)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_a_second_run_waits_for_the_gpu(tmp_path: Path) -> None:
    code = "import sys; from tasks.model import pick_device; print(pick_device(), flush=True); sys.stdin.read()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        run = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        runs.append((run, run.stdout.readline().strip()))
    assert runs[0][1] == "cuda"
    assert runs[1][1].startswith("GPU ")
    assert f"is in use by process {runs[0][0].pid}" in runs[1][1]
    runs[0][0].communicate()
    assert runs[1][0].communicate()[0].strip() == "cuda"
