"""How much memory a run takes at most, phase by phase, as a sum of items.

The sums follow what the code holds: the engines (`tasks/engine`, `tasks/precision.py`), the generators, the
checkpoints (`tasks/checkpoint.py`) and supervised training (`tasks/base/fit.py`). Activations are those of the decoders
of Llama and Qwen2, at the longest row that the budgets allow, so most steps take less. Not counted: services that load
models.

Estimate over measured peak (`peak_rss_mb`) on a CPU. SmolLM2-135M at scale small in bfloat16: start policy 1.0,
evaluation 1.0; four micro-batches of training 2.9, because the heap grows over many. Tiny policy at scale laptop in
float32: start policy 1.1, training 1.9 to 2.4, evaluation 1.2 to 2.6, whose rows rarely reach their budgets.

On an H100, a model of 110 million weights in bfloat16 with rows at their budgets: play 1.3 to 1.9, update 1.2 to 1.9
(`tests/gpu/test_one_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tasks.agent.rollout import RolloutConf
from tasks.attention import LONGEST_BY_MATRICES
from tasks.base.settings import BaseConf, FormatConf
from tasks.engine import LOGIT_CHUNK
from tasks.model import Dtype, LoraConf
from tasks.plan.machine import Machine
from tasks.plan.model_size import ModelSize
from tasks.train.settings import TrainConf

Place = Literal["GPU", "memory"]
FLOAT, HALF = 4, 2
START = "start policy"
"""The phase of stage `base`."""
ADAM, MOMENTS_AND_WEIGHTS = 2 * FLOAT, 3 * FLOAT

PROCESS = 700_000_000
"""Python, torch, transformers, the data and the index of a small run."""
HEAP = {FLOAT: 1.5, HALF: 3.3}
"""On a CPU, bytes that the process keeps for each byte of activations, by the bytes of a number: micro-batches differ
in length, so freed blocks do not fit the next ones, and the process keeps them (`tasks/device.py`)."""
HEAP_OF_CACHE = 1.5
"""Likewise for keys and values, whose buffers grow with the rows."""
GPU_PROCESS = 1_000_000_000
"""CUDA's context and kernels; also what vLLM keeps of a GPU in its sleep."""
VLLM_PROCESS = 2_000_000_000
"""vLLM's own process on a CPU, without weights and cache."""
KEPT_WHOLE = 100_000
"""DeepSpeed does not divide tensors of less than this many numbers."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory: its name, bytes, and where they lie."""

    name: str
    size: int
    place: Place


@dataclass(frozen=True)
class Phase:
    """What is in memory at the same time."""

    name: str
    items: tuple[Item, ...]

    def size(self, place: Place) -> int:
        """Bytes at a place."""
        return sum(item.size for item in self.items if item.place == place)

    def largest(self, place: Place, count: int) -> list[Item]:
        """The largest items at a place."""
        there = [item for item in self.items if item.place == place]
        return sorted(there, key=lambda item: -item.size)[:count]


@dataclass(frozen=True)
class Learner:
    """What a method adds.

    Attributes:
        has_critic: a critic is trained beside the policy.
        has_reference: a frozen copy of the start policy is held.
        plays_start: a second generator plays the start policy.
        rows: trajectories of a step and those of a validation, the greater number.
    """

    has_critic: bool
    has_reference: bool
    plays_start: bool
    rows: int


@dataclass(frozen=True)
class Served:
    """A generator in processes of its own, vLLM.

    Attributes:
        gpu_share: of a GPU's memory that those on it take, weights included.
        cpu_cache: bytes of its keys and values where it runs on a CPU.
    """

    gpu_share: float
    cpu_cache: int


@dataclass(frozen=True)
class Division:
    """Workers that divide what is trained (ZeRO); see `tasks/engine/deepspeed.py`.

    Attributes:
        workers: all of them.
        on_host: the most on one host.
        stage, offload, bucket: as the engine's.
    """

    workers: int
    on_host: int
    stage: Literal[0, 1, 2, 3]
    offload: bool
    bucket: int

    def share(self, numbers: int) -> int:
        """Of so many numbers, those of one worker."""
        return -(-numbers // self.workers)

    def kept_whole(self, model: ModelSize) -> int:
        """Weights of a model under training that each worker holds whole although weights are divided."""
        return model.weights_below(KEPT_WHOLE) if self.stage == 3 else 0


@dataclass(frozen=True)
class Taught:
    """Supervised training of one model.

    Attributes:
        name: of the phase.
        model: its size.
        dtype: of forward passes.
        tokens: of the largest micro-batch.
        longest: tokens of the longest row.
        on_gpu: this process trains it on a GPU where there is one, as workers always do.
        logit_share: of the tokens, those whose logits are computed.
        keeps_all: False recomputes activations.
        is_scored: a reward model: float32 weights, which are rounded in each forward pass, and a copy of the best ones.
    """

    name: str
    model: ModelSize
    dtype: Dtype
    tokens: int
    longest: int
    on_gpu: bool = True
    logit_share: float = 1.0
    keeps_all: bool = True
    is_scored: bool = False


@dataclass(frozen=True)
class Demand:
    """Everything that the memory of a run depends on.

    Attributes:
        model: of the policy.
        machine: where it runs.
        train, rollout, lora: as the stage `train` gets them.
        learner: of the method; None where nothing is trained.
        teaching: of the start policy; None where it is taken as it comes.
        vllm: the generator in processes of its own; None for the plain generator.
        generators: of a fleet, the most on one host; 0 without a fleet.
        division: the workers that train; None where this process does.
        others: reward models and readers that are trained for services.
    """

    model: ModelSize
    machine: Machine
    train: TrainConf
    rollout: RolloutConf
    lora: LoraConf
    learner: Learner | None
    teaching: BaseConf | FormatConf | None
    vllm: Served | None
    division: Division | None = None
    others: tuple[Taught, ...] = ()
    generators: int = 0

    @property
    def place(self) -> Place:
        """Where the policy is trained and plays."""
        return "memory" if self.machine.gpu is None else "GPU"

    @property
    def bytes_of(self) -> int:
        """Of a number in the forward passes of training and play."""
        return _bytes_of(self.train.dtype, self.machine.trains_in_bfloat16)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that the budgets allow."""
        play = self.rollout
        written = (play.max_turns + 1) * play.max_call_tokens
        read = play.max_turns * play.max_observation_tokens
        return min(play.max_total_tokens, play.max_prompt_tokens + written + read)

    @property
    def trained(self) -> int:
        """Weights of the policy that the optimizer changes."""
        return self.model.adapters(self.lora) if self.lora.rank else self.model.num_weights


def _bytes_of(dtype: Dtype, has_bfloat16: bool) -> int:
    return FLOAT if dtype == "float32" or not has_bfloat16 else HALF


def phases(demand: Demand) -> list[Phase]:
    """The phases of a run in order."""
    found = [_beginning(demand), *(_phase(demand, taught) for taught in demand.others)]
    if demand.learner is not None:
        held = (*_process(demand), *_held(demand, demand.learner))
        found += [
            Phase("play", (*held, *_playing(demand, demand.learner.rows))),
            Phase("update", (*held, *_updating(demand, demand.learner))),
            Phase("checkpoint", (*held, *_saving(demand, demand.learner))),
        ]
    rows = demand.rollout.batch_rows
    return [*found, Phase("evaluation", (*_process(demand), *_evaluating(demand), *_playing(demand, rows)))]


def _process(demand: Demand, on_gpu: bool = True) -> Iterator[Item]:
    workers = demand.division.on_host if demand.division else 0
    yield Item("Python and its libraries", PROCESS * (1 + workers + demand.generators), "memory")
    if on_gpu and demand.place == "GPU":
        yield Item("CUDA", GPU_PROCESS, "GPU")


def _beginning(demand: Demand) -> Phase:
    """Supervised training of the start policy, of a tiny one on the processor; or its copy."""
    model, teaching = demand.model, demand.teaching
    if teaching is None:
        copied = Item("weights", model.stored, "memory")
        return Phase(START, (*_process(demand, on_gpu=False), copied))

    dtype: Dtype = teaching.dtype if isinstance(teaching, FormatConf) else "float32"
    # Segments that teach a tiny policy to copy have a loss on every token.
    share = 1.0
    if isinstance(teaching, FormatConf):
        written = (demand.rollout.max_turns + 1) * demand.rollout.max_call_tokens
        read_once = demand.rollout.max_prompt_tokens if teaching.share_reading else 0
        share = min(1.0, written / max(1, demand.longest - read_once))
    tokens, on_gpu = max(teaching.max_batch_tokens, demand.longest), isinstance(teaching, FormatConf)
    return _phase(demand, Taught(START, model, dtype, tokens, demand.longest, on_gpu, share))


def _phase(demand: Demand, taught: Taught) -> Phase:
    on_gpu = taught.on_gpu or demand.division is not None
    return Phase(taught.name, (*_process(demand, on_gpu), *supervised(taught, demand.machine, demand.division)))


def supervised(taught: Taught, machine: Machine, division: Division | None) -> Iterator[Item]:
    """What supervised training takes: of this process, or of workers, whose stage then has a copy of the weights."""
    model, count = taught.model, taught.model.num_weights
    place: Place = "GPU" if machine.gpu is not None and (taught.on_gpu or division is not None) else "memory"
    has_bfloat16 = machine.trains_in_bfloat16 if place == "GPU" else machine.host_has_bfloat16
    size = _bytes_of(taught.dtype, has_bfloat16)
    held, times = FLOAT if taught.is_scored else size, 1

    if division is None:
        yield from _trained("policy", count, count, held, place)
        yield Item("gradients", FLOAT * count, place)
    else:
        times = division.on_host if place == "memory" else 1
        yield Item("weights in the stage", FLOAT * count, "memory")
        yield from _divided_model("policy", model, count, count, held, place, division)
        yield Item("gradients", _gradients(division, place, count), place)
        yield Item("copies of weights and moments", MOMENTS_AND_WEIGHTS * count, "memory")
    if taught.is_scored:
        yield Item("best weights", FLOAT * count, place if division is None else "memory")
        if size == HALF:
            yield Item("rounded weights", times * HALF * count, place)

    # A reward model takes the attention of transformers, which keeps no scores.
    scores = 0 if size == FLOAT or taught.is_scored else min(taught.longest, LONGEST_BY_MATRICES)
    activations = times * _activations(model, taught.tokens, size, scores, taught.keeps_all)
    yield Item(f"activations of {taught.tokens} tokens", int(HEAP[size] * activations), place)
    logits = 0 if taught.is_scored else times * taught.logit_share * taught.tokens * model.vocab
    yield Item("logits", int(HEAP[size] * logits * (size + 3 * FLOAT)), place)


def _trained(name: str, num_weights: int, num_trained: int, size: int, place: Place) -> Iterator[Item]:
    """A model under training, without its gradients."""
    yield Item(f"{name}: weights", size * num_weights, place)
    if size == HALF:
        yield Item(f"{name}: float32 copy", FLOAT * num_trained, place)
    yield Item(f"{name}: Adam", ADAM * num_trained, place)


def _held(demand: Demand, learner: Learner) -> Iterator[Item]:
    """What training holds in all of its phases; of workers, what those of one host or one GPU hold together."""
    if demand.division is not None:
        yield from _divided(demand, learner, demand.division)
        return
    model, size, place = demand.model, demand.bytes_of, demand.place
    own = demand.trained if demand.lora.rank else 0
    yield from _trained("policy", model.num_weights + own, demand.trained, size, place)
    if learner.has_critic:
        yield from _trained("critic", model.decoder_weights, model.decoder_weights, size, place)
    if learner.has_reference and not demand.lora.rank:
        yield Item("reference", size * model.num_weights, place)
    if learner.plays_start:
        yield from _generator(demand, "start policy that plays")
    if demand.vllm is not None and demand.place == "memory":
        yield from _generator(demand, "vLLM")
    if demand.vllm is None and demand.generators:
        yield from _generator(demand, "generators")


def _divided(demand: Demand, learner: Learner, division: Division) -> Iterator[Item]:
    """What the workers hold, and what play needs besides, since it does not use their weights."""
    model, size, place = demand.model, demand.bytes_of, demand.place
    own = demand.trained if demand.lora.rank else 0
    yield from _divided_model("policy", model, model.num_weights + own, demand.trained, size, place, division)
    if learner.has_critic:
        count = model.decoder_weights
        yield from _divided_model("critic", model, count, count, size, place, division)

    if learner.has_reference and not demand.lora.rank:
        there, count = _there(division, place), model.num_weights
        yield Item("reference", there * size * (division.share(count) if division.stage == 3 else count), place)
    if learner.plays_start:
        yield from _generator(demand, "start policy that plays")
    if demand.vllm is None or place == "memory":
        yield from _generator(demand, "generator" if demand.vllm is None else "vLLM")


def _divided_model(
    name: str, model: ModelSize, count: int, learned: int, size: int, place: Place, division: Division
) -> Iterator[Item]:
    """A model under training by workers, without gradients that only an update holds.

    Args:
        name: for items.
        model: its size.
        count: its weights, adapters included.
        learned: weights that are trained.
        size: bytes of a weight in forward passes.
        place: where they lie.
        division: the workers.
    """
    there = _there(division, place)
    weights = division.share(count) + division.kept_whole(model) if division.stage == 3 else count
    yield Item(f"{name}: weights", there * size * weights, place)
    if division.stage == 0:
        if size == HALF:
            yield Item(f"{name}: float32 copy", there * FLOAT * learned, place)
        yield Item(f"{name}: Adam", there * ADAM * learned, place)
        return

    states: Place = "memory" if division.offload else place
    times = division.on_host if division.offload else there
    yield Item(f"{name}: float32 copy", times * FLOAT * division.share(learned), states)
    yield Item(f"{name}: Adam", times * ADAM * division.share(learned), states)
    if division.stage == 3:
        gradients = division.share(learned) + min(division.bucket, learned)
        yield Item(f"{name}: gradients", there * FLOAT * gradients, place)


def _there(division: Division, place: Place) -> int:
    """Workers that share this memory; each has a GPU of its own."""
    return division.on_host if place == "memory" else 1


def _gradients(division: Division | None, place: Place, learned: int) -> int:
    """Bytes of gradients that only an update holds."""
    if division is None:
        return FLOAT * learned
    there = _there(division, place)
    if division.stage == 3:
        return 0
    if division.stage == 2:
        return there * FLOAT * (division.share(learned) + min(division.bucket, learned))
    return there * FLOAT * learned


def _generator(demand: Demand, name: str) -> Iterator[Item]:
    """A generator with weights of its own, or a fleet of them."""
    times = max(1, demand.generators)
    weights = demand.bytes_of * demand.model.num_weights
    if demand.vllm is None:
        yield Item(f"{name}: weights", times * weights, demand.place)
    elif demand.machine.gpu is not None:
        yield Item(name, int(demand.vllm.gpu_share * demand.machine.gpu.size), "GPU")
    else:
        yield Item(f"{name}: weights", times * weights, "memory")
        yield Item(f"{name}: keys and values", times * demand.vllm.cpu_cache, "memory")
        yield Item(f"{name}: its process", times * VLLM_PROCESS, "memory")


def _playing(demand: Demand, rows: int) -> Iterator[Item]:
    """What a generator takes besides weights while these rows play, `batch_rows` at most at once."""
    if demand.vllm is not None:
        if demand.place == "GPU":  # On a processor it does not sleep, so it is among what is held.
            yield from _generator(demand, "vLLM")
        return
    model, play, size = demand.model, demand.rollout, demand.bytes_of
    rows = min(rows, play.batch_rows)
    cache = rows * demand.longest * 2 * model.layers * model.keys * size
    kept = HEAP_OF_CACHE if demand.place == "memory" else 1.0
    yield Item(f"keys and values of {rows} rows of {demand.longest} tokens", int(kept * cache), demand.place)

    read = max(play.max_prompt_tokens, min(play.max_observation_tokens, demand.longest))
    per_token = size * (3 * model.intermediate + 4 * model.hidden)
    mask = model.heads // model.kv_heads * demand.longest * (1 + size)
    yield Item("reading of prompts and documents", rows * read * (per_token + mask), demand.place)
    yield Item("logits", rows * model.vocab * (size + 3 * FLOAT), demand.place)


def _updating(demand: Demand, learner: Learner) -> Iterator[Item]:
    """Forward and backward pass of the largest micro-batch; policy and critic learn one after the other."""
    model, size, place, train = demand.model, demand.bytes_of, demand.place, demand.train
    critic = model.decoder_weights if learner.has_critic else 0
    yield Item("gradients", _gradients(demand.division, place, max(demand.trained, critic)), place)

    times = demand.division.on_host if demand.division and place == "memory" else 1
    tokens = max(train.max_batch_tokens, demand.longest)
    activations = _activations(model, tokens, size, _scores(demand), train.keep_activations)
    kept = HEAP[size] if place == "memory" else 1.0
    yield Item(f"activations of {tokens} tokens", times * int(kept * activations), place)
    chunk = LOGIT_CHUNK["cuda" if place == "GPU" else "cpu"] // model.vocab
    yield Item("logits", times * min(tokens, max(1, chunk)) * model.vocab * (size + 4 * FLOAT), place)
    if demand.vllm is not None and place == "GPU":
        if train.play_ahead:
            yield from _generator(demand, "vLLM, which plays ahead")
        else:
            yield Item("vLLM, asleep", GPU_PROCESS, place)


def _scores(demand: Demand) -> int:
    """Most attention scores of a token and a head that training keeps; see `tasks/attention.py`."""
    if demand.bytes_of == FLOAT or demand.place == "GPU":
        return 0
    if demand.train.share_prefixes == "longest":
        return demand.longest
    prefix = demand.rollout.max_prompt_tokens if demand.train.share_prefixes else 0
    return min(demand.longest, prefix + LONGEST_BY_MATRICES)


def _activations(model: ModelSize, tokens: int, size: int, scores: int, keeps_all: bool) -> int:
    """Bytes that the backward pass needs of a micro-batch.

    Of each token a layer keeps: for its two norms the input in float32, the normalised input and the output; queries,
    keys, values and what attention read, twice; gate, up, their activation and product; attention scores.

    Args:
        model: sizes.
        tokens: of the micro-batch.
        size: bytes of a number.
        scores: of a token and a head.
        keeps_all: False keeps the inputs of layers, and computes one layer after the other again.
    """
    norms = 2 * model.hidden * (FLOAT + 2 * size)
    numbers = 3 * model.query + 2 * model.keys + 4 * model.intermediate + model.heads * scores
    layer = tokens * (norms + size * numbers)
    if keeps_all:
        return (model.layers + 1) * layer  # One more for the gradients of the layer that is worked on.
    return model.layers * tokens * model.hidden * size + 2 * layer


def _saving(demand: Demand, learner: Learner) -> Iterator[Item]:
    """A checkpoint copies weights and moments of one model after the other; an export with adapters, the model."""
    critic = demand.model.decoder_weights if learner.has_critic else 0
    yield Item("copies of weights and moments", MOMENTS_AND_WEIGHTS * max(demand.trained, critic), "memory")
    if demand.lora.rank:
        yield Item("merged copy", demand.bytes_of * demand.model.num_weights, demand.place)


def _evaluating(demand: Demand) -> Iterator[Item]:
    """The generators' weights; vLLM on a GPU has them within its share."""
    if demand.vllm is None or demand.place == "memory":
        yield from _generator(demand, "vLLM" if demand.vllm else "policy")
    if demand.vllm is not None:  # It is compared with transformers in float32.
        compared = max(1, demand.generators) * FLOAT * demand.model.num_weights
        yield Item("comparison with float32", compared, "memory")
