"""Loads and saves a causal LM and its tokenizer, and chooses device and dtype. It trains and generates nothing."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, PositiveFloat
from safetensors import safe_open

from tasks import device
from tasks.conf import LearningRate, require
from tasks.model_files import MADE_FROM, check_files, lacking, weight_files
from tasks.store import DataError

Dtype = Literal["auto", "float32", "bfloat16"]
"""Dtype of forward passes; `auto` is bfloat16 on GPUs and processors that have it."""
SAVED = "what save_pretrained writes, all of one model; copy or save the folder again"
NO_MEMORY = "Cannot allocate memory"
FOREIGN = (
    "it needs Python code that comes with the model (`auto_map`), which is never run here, because such code can do "
    "anything on this machine. Expected an architecture that transformers has itself, such as Qwen2 or Llama. Name "
    "another model in conf/model"
)
"""Said of a folder whose model transformers knows from code in the folder or on the hub alone."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoraConf:
    """Low-rank adapters (peft) during reinforcement learning; rank 0 trains all weights.

    Attributes:
        rank: of the two factors of each adapter.
        alpha: the factors' product is multiplied by alpha / rank.
        targets: linear layers that get adapters, by the end of their names.
        lr: learning rate of adapters; None takes the policy's. Adapters bear a rate some ten times as high.
    """

    rank: Annotated[int, Field(ge=0, description="0: off")] = 0
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lr: LearningRate | None = None

    def __post_init__(self) -> None:
        require(self.lr is None or self.rank > 0, "lr", self.lr, "none where rank is 0: there are no adapters")


def pick_device(count: int = 1) -> torch.device:
    """The first GPU, else the CPU. This process then holds the first `count` GPUs until it ends."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device.hold(device.gpus()[:count])
    return torch.device("cuda")


def computes_in(dtype: Dtype, where: torch.device) -> torch.dtype:
    """The torch dtype that forward passes of this setting use on this device.

    A device without instructions for bfloat16 computes in float32, whatever the setting, because it would emulate them
    at a small part of its speed.
    """
    if dtype == "float32":
        return torch.float32
    is_half = torch.cuda.is_bf16_supported() if where.type == "cuda" else _cpu_has_bfloat16()
    if dtype == "bfloat16" and not is_half:
        log.warning("bfloat16 was asked for, but this %s has no instructions for it: computing in float32.", where.type)
    return torch.bfloat16 if is_half else torch.float32


def _cpu_has_bfloat16() -> bool:
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model folder as (causal LM, tokenizer), on the CPU.

    Raises:
        DataError: the folder lacks a configuration, safetensors weights or a tokenizer, one cannot be loaded, they do
            not belong together, or the model computes what generator and trainer do not expect.
    """
    model, tokenizer, _ = _read(folder, dtype=dtype)
    _try(folder, model.eval())
    return model, tokenizer


def outline(folder: Path) -> tuple[Any, Any, Collection[str]]:
    """A model folder as (causal LM, tokenizer), the model on device `meta`: its modules and shapes, without weights.

    Also the names of weights in its files that the model does not have, and that no one will use.

    Raises:
        DataError: as `load_policy`, but for what only weights show.
    """
    return _read(folder, device_map="meta")


def _read(folder: Path, **options: Any) -> tuple[Any, Any, Collection[str]]:
    from tasks.pretrained import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    # transformers would ask on a terminal whether it may run the code of a folder; False asks nobody.
    options |= {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    options |= {"output_loading_info": True}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, **options)
    model, info = loaded(folder, "configuration and weights", load)
    require_whole(folder, model, info)

    embedded, largest = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values(), default=-1)
    if largest >= embedded:
        raise DataError(
            f"{folder}: the tokenizer has token ids up to {largest}, and the model embeds ids below {embedded}. "
            "Expected a tokenizer and weights of one model."
        )
    return model, tokenizer, info["unexpected_keys"]


def require_whole(folder: Path, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse a model some of whose weights were in no file: transformers makes them up at random.

    Args:
        folder: or file of the model, for the message.
        model: as loaded.
        info: what `from_pretrained` says with `output_loading_info`.

    Raises:
        DataError: weights are missing.
    """
    if names := info["missing_keys"]:
        raise DataError(
            f"{folder}: {len(names)} weights of {type(model).__name__} are in no file of the model, such as "
            f"{min(names)}. Expected all that its configuration describes. Copy or save the model again."
        )


@torch.inference_mode()
def _try(folder: Path, model: Any) -> None:
    """Whether generator and trainer may take its logits for `head(decoder(ids))`, of what stands to the left alone."""
    ids = torch.arange(min(4, model.get_input_embeddings().weight.shape[0]), device=model.device)[None]
    other = torch.cat([ids[:, :-1], ids[:, :1]], 1)
    logits, others = (model(input_ids=one, use_cache=False).logits for one in (ids, other))
    if not logits.isfinite().all():
        raise DataError(f"{folder}: its logits are not finite numbers. Expected weights without NaN or infinity.")

    problem, close = "", functools.partial(torch.allclose, rtol=1e-3, atol=1e-3)
    if not close(model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False)[0]), logits):
        problem = "its logits are not head(decoder(ids)), but scaled or capped"
    elif not close(others[:, :-1], logits[:, :-1]):
        problem = "its logits depend on later tokens"
    if problem:
        raise DataError(
            f"{folder}: {type(model).__name__}: {problem}, which generator and trainer do not expect. Use a causal "
            "model of another architecture, such as Qwen2 or Llama."
        )


def stored_weights(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype, as safetensors spells it (`F32`, `BF16`), and shape of every weight in the files of a model folder."""
    weights: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                weights[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    return weights


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight in the files of a model folder, one at a time."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype in which a model can be loaded and saved again without a change: that of its files, if it is one.

    Raises:
        DataError: as `load_policy`.
    """
    check_folder(folder)
    found = loaded(folder, "the weights", lambda: {dtype for dtype, _ in stored_weights(folder).values()})
    halves = {"BF16": torch.bfloat16, "F16": torch.float16}
    return halves.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        DataError: as `load_policy`.
    """
    from tasks.pretrained import AutoTokenizer

    check_folder(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    return loaded(folder, "the tokenizer", lambda: AutoTokenizer.from_pretrained(folder, **options))


def check_folder(folder: Path) -> None:
    """Refuse a folder without a model, and one of which a loader would read what no hash covers.

    Raises:
        DataError: as `load_policy` and `check_files`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: the model folder is missing. Name an existing folder in conf/model.")
    if lacks := lacking(folder):
        raise DataError(
            f"{folder}: no {lacks}. Save the model with save_pretrained and its tokenizer with "
            "tokenizer.save_pretrained into the same folder."
        )
    check_files(folder)


def loaded(folder: Path, what: str, load: Callable[[], T], expected: str = SAVED) -> T:
    """What `load` gives; whatever it raises becomes a DataError that names the folder and says what was expected."""
    try:
        return load()
    except MemoryError:
        raise
    except Exception as error:  # transformers and tokenizers raise errors of every class.
        if "trust_remote_code" in str(error):
            raise DataError(f"{folder}: transformers cannot load {what}: {FOREIGN}.") from None
        reason = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
        if (Path(folder) / MADE_FROM).is_file():
            expected = f"what a run made of {Path(folder) / MADE_FROM}; delete the folder, the next run makes it again"
        if NO_MEMORY in reason:
            raise DataError(f"{folder}: too little memory to load {what}: {reason}. Free some and run again.") from None
        raise DataError(
            f"{folder}: transformers cannot load {what}: {type(error).__name__}: {reason}. Expected {expected}."
        ) from error


def export_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model and tokenizer as an ordinary model folder; nothing in it depends on time or place."""
    model.config._name_or_path = ""
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
