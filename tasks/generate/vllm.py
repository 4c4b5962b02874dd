"""The vLLM generator has the protocol of `plain.py` and is fast on GPUs; tests run it on a CPU.

Token ids go in and come out; no text is tokenised here. After loading and after each update the engine's logprobs are
compared with a reference, and a generator that did not pass the comparison refuses to play: an update that vLLM dropped
in silence would make all samples off-policy. It knows nothing of questions, tags, retrieval or rewards.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from tasks import libraries
from tasks.conf import require
from tasks.generate import (
    Adapters,
    Call,
    Revived,
    Sampling,
    Shapes,
    Trainee,
    Weights,
    WeightsError,
    checked,
    handover,
    not_open,
    proof,
    require_prompts,
)
from tasks.generate.adapters import merged, shapes_of
from tasks.lifetime import killed_after_us
from tasks.model import Dtype, check_folder, computes_in, pick_device
from tasks.store import read_json

Reference = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
Precision = Literal["float32", "bfloat16"]
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXTENSION = "tasks.generate.vllm.WeightsExtension"
_READ_AT_ONCE = 2048  # Tokens of all rows in one forward pass of a CPU, unless a single text may be longer.
# Largest allowed |logprob difference| on the probe tokens. Two float32 implementations agree to about 1e-5 on a CPU; on
# GPUs matrix products may take TensorFloat-32. bfloat16 keeps 8 bits, which adds up over the layers.
_TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.3}
_GPU_FLOAT32_TOLERANCE = 2e-2


@dataclass(frozen=True)
class VllmConf:
    """Engine options, `conf/generator/vllm.yaml`. Weights and activations have the dtype of training.

    Attributes:
        max_model_len: longest prompt + response in tokens that a session may ask for; less where the model has
            fewer positions.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes; lower it if a trainer uses the same GPU.
        cpu_kv_cache_gib: size of the KV cache where vLLM runs on CPU; unused on GPUs.
        tensor_parallel_size: GPUs (on CPU: processes) that share one copy of the model.
        enforce_eager: True starts faster, False decodes faster on GPUs (CUDA graphs).
        block_size: tokens per block of the prefix cache; only whole blocks are reused, so short turns want small ones.
    """

    requires = libraries.VLLM

    max_model_len: int
    gpu_memory_utilization: float
    cpu_kv_cache_gib: float
    tensor_parallel_size: int
    enforce_eager: bool
    block_size: int

    def __post_init__(self) -> None:
        smallest = max(proof.LENGTHS) + 1
        require(self.max_model_len >= smallest, "max_model_len", self.max_model_len, f"at least {smallest}")
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", share, "more than 0, at most 1")
        require(self.cpu_kv_cache_gib > 0, "cpu_kv_cache_gib", self.cpu_kv_cache_gib, "more than 0")
        require(self.tensor_parallel_size >= 1, "tensor_parallel_size", self.tensor_parallel_size, "at least 1")
        block = self.block_size
        require(block >= 16 and block % 16 == 0, "block_size", block, "a multiple of 16")

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> VllmGenerator:
        """See `GeneratorConf.start`; vLLM's logprobs are compared with the trainee's."""
        libraries.require(self.requires)
        computed = computes_in(dtype, pick_device(self.tensor_parallel_size))
        precision: Precision = "bfloat16" if computed == torch.bfloat16 else "float32"
        return VllmGenerator(folder, self, precision, None if trainee is None else trainee.sequence_logprobs)


PART = VllmConf


class WeightsExtension:
    """Methods that vLLM adds to its worker (`worker_extension_cls`), so that an update is one call with a path."""

    def load_policy(self, path: str, folder: str = "", scale: float = 0.0) -> None:
        """Reload all weights from a safetensors file, then renew the packed copies that vLLM made of them.

        If a folder is given, the file has adapters, which are added to the weights in that folder.

        On a CPU vLLM multiplies with a packed copy of each matrix. Reloading renews the copy of every layer that
        appears in the checkpoint. A tied output head does not appear there, and would go on with the old weights.
        """
        with safe_open(path, framework="pt") as file:
            given = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            weights = merged(Path(folder), dict(given), scale) if folder else given
            self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
        packed = [m for m in self.get_model().modules() if hasattr(m, "cpu_linear")]  # type: ignore[attr-defined]
        for module in packed:
            if module.weight.numel():  # The reload has packed all other layers, and emptied their weight.
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class VllmGenerator:
    """A model folder that vLLM serves in processes of its own.

    The calling script needs the main-module guard, because vLLM starts its processes by spawning.

    Args:
        folder: Hugging Face model folder with its tokenizer.
        conf: engine options.
        precision: dtype of weights and activations.
        reference: maps probes to the logprobs of `probe[1:]` under the policy whose weights this generator holds or is
            given, computed in `precision`. None loads the folder with transformers (float32, CPU), exact but slow for
            large models.
        probes: token sequences whose logprobs are compared; None takes two fixed pseudo-random ones.

    Raises:
        ValueError: the folder is not a model folder with a tokenizer.
        WeightsError: the loaded engine disagrees with the reference.
    """

    shares_weights = False
    plays_apart = True
    rows_are_free = True

    def __init__(
        self,
        folder: Path,
        conf: VllmConf,
        precision: Precision = "float32",
        reference: Reference | None = None,
        probes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        check_folder(folder)
        self.conf, self.folder = conf, folder
        self.precision = precision
        self._reference = reference or partial(folder_logprobs, folder)
        self._shapes = handover.stored_shapes(folder)
        self._sent = proof.Sent(folder)
        self._version = 0
        self._is_checked = False
        self._sleeps = False
        self._asked: dict[str, tuple[VllmSession, int]] = {}  # Name of a request -> the row that it continues.
        self._num_asked = 0

        self._max_model_len = min(conf.max_model_len, max_positions(folder) or conf.max_model_len)
        self._llm = _start(folder, replace(conf, max_model_len=self._max_model_len), precision)
        self._end_ids = end_ids(folder, self._llm.get_tokenizer())
        self._probes = [list(p) for p in probes] if probes is not None else proof.probes(folder)
        self._ended = threading.Event()
        self._guard = _guard(self._llm, self._ended)
        try:
            self._check()
        except BaseException:
            self.shutdown()
            raise

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> VllmSession:
        """Start `len(prompts) * copies` rows; prompt + response never exceed `max_total_tokens` per row.

        Raises:
            WeightsError: it sleeps, lost its weights in sleep, or its last update failed or gave other logprobs.
            ValueError: a budget above the engine's, or a prompt that does not fit it.
        """
        if self._sleeps:
            raise WeightsError("the vLLM engine sleeps. Wake it, and give it the policy's weights.")
        if not self._is_checked:
            raise WeightsError(
                "the vLLM engine holds unknown weights: it slept, or its last update failed. Give it new weights."
            )
        if max_total_tokens > self._max_model_len:
            place = "conf/generator/vllm.yaml: max_model_len"
            if self._max_model_len < self.conf.max_model_len:
                place = "the model's config.json: max_position_embeddings"
            raise ValueError(
                f"{place}={self._max_model_len} is below the {max_total_tokens} tokens (prompt + response) asked for. "
                "Raise it, or lower max_total_tokens."
            )
        require_prompts(prompts, max_total_tokens)
        return VllmSession(self, prompts, copies, sampling, max_total_tokens)

    def update_weights(self, weights: Weights | Adapters) -> None:
        """See `Generator.update_weights`; the weights go through memory, and vLLM's logprobs are checked after it.

        Raises:
            WeightsError: as there, or vLLM could not load them, or its logprobs differ from the reference by more than
                rounding explains. The generator then refuses to open sessions until an update succeeds.
        """
        if self._sleeps:
            raise WeightsError("the vLLM engine sleeps and cannot take weights. Wake it first.")
        given, shapes, dtype, more = self._staging(weights)
        with handover.staged(self._sent.noted(checked(given, shapes)), shapes, dtype) as path:
            self._is_checked = False
            self._version += 1
            try:
                self._llm.collective_rpc("load_policy", args=(path, *more))
            except Exception as error:  # vLLM wraps every error of its worker in a bare Exception.
                raise WeightsError(f"vLLM could not load the new weights: {' '.join(str(error).split())}") from error
        if self._llm.reset_prefix_cache() is False:
            raise WeightsError("vLLM took the new weights but kept cached states of the old ones. Start it again.")
        self._check()

    def _staging(self, weights: Weights | Adapters) -> tuple[Weights, Shapes, torch.dtype, tuple[Any, ...]]:
        """The tensors that vLLM gets, their shapes and dtype, and further arguments of `load_policy`."""
        if not isinstance(weights, Adapters):
            return weights, self._shapes, _TORCH[self.precision], ()
        more = (str(self.folder.absolute()), weights.scale)
        # In float32, because only the sum is to be rounded.
        return weights.factors, shapes_of(weights, self._shapes), torch.float32, more

    def sleep(self) -> None:
        """See `Generator.sleep`; on GPUs the weights are lost. On a CPU vLLM keeps them, but nobody plays with them."""
        if self._sleeps:
            return
        self._sleeps = True
        self._is_checked = False
        self._version += 1
        if self._frees_memory:
            self._llm.sleep(level=2)

    def wake(self) -> None:
        """See `Generator.wake`."""
        if self._sleeps and self._frees_memory:
            self._llm.wake_up()
        self._sleeps = False

    @property
    def _frees_memory(self) -> bool:
        """Whether vLLM can sleep on this platform; its CPU worker only warns."""
        return bool(self._llm.llm_engine.model_config.enable_sleep_mode)

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]`, each given all tokens before it, under the engine's current weights."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self._llm.generate([TokensPrompt(prompt_token_ids=list(token_ids))], params, use_tqdm=False)
        return [entry[token].logprob for token, entry in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)]

    def parity_gap(self) -> float:
        """Largest |engine - reference| logprob over all probe tokens."""
        expected = self._reference(self._probes)
        return proof.largest_gap([self.probe(probe) for probe in self._probes], expected)

    def shutdown(self) -> None:
        """Free the model and end vLLM's processes; calling it again does nothing."""
        self._is_checked = False
        llm, self._llm = self._llm, None
        if llm is not None:
            self._ended.set()
            self._guard.kill()
            self._guard.wait()
            llm.llm_engine.engine_core.shutdown()

    @property
    def is_lost(self) -> bool:
        """Whether vLLM's process has died; nothing can be asked of it then."""
        return self._llm is not None and _is_dead(self._llm)

    @property
    def tolerance(self) -> float:
        """Largest distance of a logprob from the policy's that rounding explains."""
        on_gpu = pick_device().type != "cpu"
        return _GPU_FLOAT32_TOLERANCE if on_gpu and self.precision == "float32" else _TOLERANCE[self.precision]

    def _check(self) -> None:
        gap = self.parity_gap()
        if gap > self.tolerance:
            raise WeightsError(
                f"logprobs of the vLLM engine differ from the policy's by up to {gap:.3g} on "
                f"{sum(len(p) - 1 for p in self._probes)} probe tokens, expected at most {self.tolerance:g} in "
                f"{self.precision}. It did not take the new weights, or computes this architecture in another way; "
                f"check with generator=plain.{self._sent.unchanged()}"
            )
        self._is_checked = True
        self._sent.proved()

    def _ask(self, session: VllmSession, row: int, ids: list[int], params: Any) -> None:
        """Begin a request, which `_advance` carries out beside all others."""
        from vllm import TokensPrompt

        self._num_asked += 1
        name = str(self._num_asked)
        self._asked[name] = (session, row)
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(ids)), params)

    def _advance(self) -> None:
        """One step of the engine; sessions get the requests that it has ended."""
        for output in self._llm.llm_engine.step():
            if output.finished:
                session, row = self._asked.pop(output.request_id)
                session.over.append((row, output))


class VllmSession:
    """Rows are kept as token ids on this side; vLLM's prefix cache makes the next turn of a row cheap.

    `num_prefilled` is the sum over calls of row length minus `num_cached_tokens`, as vLLM reports it. Whole blocks in
    its prefix cache are not read again; the rest is (at most one block, the observation, and evicted blocks). Tokens
    that vLLM recomputes after preempting a request are not in its report.
    `num_generated` counts every sampled token, an end-of-text token included.
    """

    def __init__(
        self,
        generator: VllmGenerator,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        self.num_prefilled = 0
        self.num_generated = 0
        self._generator = generator
        self._version = generator._version
        self._sampling = sampling
        self._max_total_tokens = max_total_tokens
        self._ids: dict[int, list[int]] = {}
        self._calls: dict[int, int] = {}
        self._begun: set[int] = set()
        self.over: list[tuple[int, Any]] = []  # Rows whose call the engine has ended, with its output.
        self.extend(prompts, copies)

    def extend(self, prompts: Sequence[Sequence[int]], copies: int, numbers: Sequence[int] | None = None) -> list[int]:
        """See `FreeSession.extend`; a fleet gives the numbers, since other sessions have those between them."""
        require_prompts(prompts, self._max_total_tokens)
        new = self._next(len(prompts) * copies) if numbers is None else numbers
        for number, row in enumerate(new):
            self._ids[row], self._calls[row] = list(prompts[number // copies]), 0
        return list(new)

    def revive(self, rows: Sequence[Revived]) -> None:
        """See `Revived`."""
        for row in rows:
            self._ids[row.number] = [*chain(*row.read), *row.pending]
            self._calls[row.number] = row.calls

    def _next(self, count: int) -> range:
        first = max(self._calls, default=-1) + 1
        return range(first, first + count)

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """Continue these rows, each until a stop string, end of text, or its own budget (at least 1).

        Draws are a function of the sampling seed, the row and the number of its call; logits of one row may
        still differ in the last bits with what is batched beside it.

        Raises:
            ValueError: a closed or repeated row, a budget below 1, or a row that is already full.
            WeightsError: the generator's weights changed since the session was opened.
        """
        self._require_same_weights()
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)!r}: expected different rows.")
        params = [self._params(row, budget) for row, budget in zip(rows, max_new_tokens, strict=True)]
        for row, one in zip(rows, params, strict=True):
            self._begin(row, one)
        calls: dict[int, Call] = {}
        while len(calls) < len(rows):
            calls |= dict(self.advance())
        return [calls[row] for row in rows]

    def submit(self, row: int, max_new_tokens: int) -> None:
        """See `FreeSession.submit`; what a row writes may differ in its last bits with what is computed beside it."""
        self._require_same_weights()
        self._begin(row, self._params(row, max_new_tokens))

    def advance(self) -> list[tuple[int, Call]]:
        """See `FreeSession.advance`."""
        if self._begun and not self.over:
            self._generator._advance()
        over, self.over = self.over, []
        return [(row, self._take(row, output)) for row, output in over]

    def _begin(self, row: int, params: Any) -> None:
        self._begun.add(row)
        self._generator._ask(self, row, self._row(row), params)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Add environment tokens to these rows; read by the next `generate`.

        Raises:
            ValueError: a closed row, or one that would exceed `max_total_tokens`.
        """
        for row, added in zip(rows, token_ids, strict=True):
            total = len(self._row(row)) + len(added)
            if total > self._max_total_tokens:
                raise ValueError(f"row {row}: {total} tokens exceed max_total_tokens={self._max_total_tokens}.")
        for row, added in zip(rows, token_ids, strict=True):
            self._ids[row].extend(added)

    def fork(self, row: int, times: int, numbers: Sequence[int] | None = None) -> list[int]:
        """`times` new rows that continue `row`; vLLM finds the whole blocks of their common text in its prefix cache.

        A new row inherits the number of calls made so far, because draws depend on the row and on the number of its
        call.

        Raises:
            ValueError: a closed row, or `times` below 1.
            WeightsError: the generator's weights changed since the session was opened.
        """
        self._require_same_weights()
        ids = self._row(row)
        if times < 1:
            raise ValueError(f"row {row}: found times={times}, expected at least 1 new row.")
        new_rows = self._next(times) if numbers is None else numbers
        for new in new_rows:
            self._ids[new] = list(ids)
            self._calls[new] = self._calls[row]
        return list(new_rows)

    def close(self, rows: Sequence[int]) -> None:
        """End these rows; vLLM evicts their cached blocks when it needs memory."""
        for row in rows:
            self._ids.pop(row, None)

    def _row(self, row: int) -> list[int]:
        if row not in self._ids:
            raise ValueError(not_open(row, max(self._calls, default=-1) + 1, len(self._ids)))
        return self._ids[row]

    def _require_same_weights(self) -> None:
        if self._version != self._generator._version:
            raise WeightsError("The policy changed while this session was open. Open a new session after an update.")

    def _params(self, row: int, budget: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._max_total_tokens - len(self._row(row))
        if budget < 1 or room < 1 or row in self._begun:
            raise ValueError(
                f"row {row}: budget {budget} with room for {room} tokens below max_total_tokens="
                f"{self._max_total_tokens}; expected at least 1 of each, and no open call. Close the row instead."
            )
        sampling = self._sampling
        greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            seed=None if greedy else _row_seed(sampling.seed, sampling.first_row + row, self._calls[row]),
            max_tokens=min(budget, room),
            stop=list(sampling.stop),
            stop_token_ids=sorted(self._generator._end_ids),
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # A stop string may be a special token.
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _take(self, row: int, output: Any) -> Call:
        self._begun.discard(row)
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        self.num_prefilled += len(self._ids[row]) - (output.num_cached_tokens or 0)
        self.num_generated += len(ids)

        stopped = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        if completion.finish_reason == "stop" and not stopped:
            ids.pop()  # The end-of-text token.
        assert completion.finish_reason in ("stop", "length"), completion.finish_reason

        logprobs = tuple(entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=False))
        assert len(logprobs) == len(ids), "vLLM returned fewer logprobs than tokens"
        self._ids[row].extend(ids)
        self._calls[row] += 1
        return Call(tuple(ids), logprobs, stopped)


def folder_logprobs(folder: Path, probes: Sequence[Sequence[int]]) -> list[list[float]]:
    """Logprobs of `probe[1:]` by transformers in float32 on the CPU, a reference that needs no trainer."""
    from tasks.pretrained import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    model.eval()
    result = []
    with torch.no_grad():
        for probe in probes:
            ids = torch.tensor([list(probe)])  # [1, T]
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
            result.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return result


def end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a call: the tokenizer's end of text and those of the folder's generation settings."""
    settings = folder / "generation_config.json"
    listed = read_json(settings if settings.is_file() else folder / "config.json").get("eos_token_id")
    ids = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return frozenset(i for i in ids if i is not None)


def max_positions(folder: Path) -> int | None:
    """The longest text that a model folder says its model can read; vLLM refuses to serve a longer one."""
    settings = read_json(folder / "config.json")
    text = settings.get("text_config", settings)  # Of a model that also reads pictures.
    return text.get("max_position_embeddings") if isinstance(text, dict) else None


def _start(folder: Path, conf: VllmConf, precision: Precision) -> Any:
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.platforms import current_platform

    options: dict[str, Any] = {"enable_sleep_mode": current_platform.is_sleep_mode_available()}
    if current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = int(conf.cpu_kv_cache_gib * 2**30)
        # vLLM draws a token behind a piece of a prompt, too, and then turns back the row's random numbers. On a CPU
        # that is an error, which ends the engine. So no prompt is read in pieces.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(_READ_AT_ONCE, conf.max_model_len)}
    return LLM(
        model=str(folder),
        dtype=precision,
        max_model_len=conf.max_model_len,
        gpu_memory_utilization=conf.gpu_memory_utilization,
        tensor_parallel_size=conf.tensor_parallel_size,
        enforce_eager=conf.enforce_eager,
        block_size=conf.block_size,
        enable_prefix_caching=True,
        logprobs_mode="raw_logprobs",  # Before temperature and top-p: what the trainer computes.
        generation_config="vllm",  # The folder's generation_config.json must not change how we sample.
        worker_extension_cls=_EXTENSION,
        seed=0,
        **options,
    )


def _guard(llm: Any, ended: threading.Event) -> subprocess.Popen[bytes]:
    """Let vLLM's processes end with this one, and calls that wait for them end with those; see `killed_after_us`."""
    core = llm.llm_engine.engine_core
    threading.Thread(target=_release, args=(core, ended), daemon=True).start()
    return killed_after_us([process.pid for process in core.resources.engine_manager.processes])


def _release(core: Any, ended: threading.Event) -> None:
    """Give vLLM's error to calls that wait for an engine that has died; vLLM itself lets them wait for ever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    while not core.resources.engine_dead:
        if ended.wait(0.5):
            return
    core.outputs_queue.put_nowait(EngineDeadError())
    for future in list(core.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())


def _is_dead(llm: Any) -> bool:
    return bool(llm.llm_engine.engine_core.resources.engine_dead)


def _row_seed(seed: int, row: int, call: int) -> int:
    return int.from_bytes(_hash(seed, row, call)[:8], "big") >> 1  # vLLM takes signed 64-bit seeds.


def _hash(*values: int) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()
