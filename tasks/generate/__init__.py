"""Text and logprobs from a model: one protocol, two generators.

They are `plain.py` (transformers, one prefill per prompt, KV cache kept across turns) and `vllm.py` (fast on GPUs, runs
on a CPU for tests). A generator knows tokens, stop strings and budgets, but no questions, tags, retrieval or rewards.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tasks import conf, parts
from tasks.model import Dtype


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy.

    Attributes:
        temperature: logits are divided by it; reported logprobs are those of the distribution at
            temperature 1 without top-p (what the trainer computes), greedy or not.
        top_p: nucleus mass; 1.0 keeps all.
        stop: a call ends right after the token that completes one of these strings.
        seed: determines every draw, together with the call's position in the session (plain generator, one machine).
        share_reading: what prompts begin with in common is read once, and rows whose texts are equal are read as one;
            the plain generator's results differ by rounding, and vLLM does so anyway.
        first_row: number of the session's first row among those of a draw that several sessions divide.
    """

    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int
    share_reading: bool = False
    first_row: int = 0


@dataclass(frozen=True)
class Call:
    """What one call of the policy wrote: ids exactly as sampled, never re-tokenised.

    Attributes:
        token_ids: up to and including the token that completes a stop string; the end-of-text token is not included.
        logprobs: natural log, one per token, at temperature 1.
        stopped: a stop string was completed (False: end of text, or the token budget ran out).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Session(Protocol):
    """Rows of text that are generated together, turn by turn; row r continues prompt r // copies, or a forked row.

    A session whose rows are all closed is closed. `num_prefilled` counts tokens that the model read without sampling,
    `num_generated` those it sampled.
    """

    num_prefilled: int
    num_generated: int

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """Continue these rows, each until a stop string, end of text, or its own budget (at least 1)."""
        ...

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Add environment tokens (an observation) to these rows; read by the next `generate`."""
        ...

    def fork(self, row: int, times: int) -> list[int]:
        """`times` new rows that continue the text of `row`, which itself stays open.

        New rows take the next numbers. They draw what rows of these numbers would draw in a session that was opened
        with them. The text of `row` is not read again, except its newest token, which every row reads with its next
        draw.
        """
        ...

    def close(self, rows: Sequence[int]) -> None:
        """End these rows; their memory may be used again. After that only `close` may be called for them."""
        ...


@runtime_checkable
class FreeSession(Session, Protocol):
    """A session whose rows begin and end their calls at any time, and in which further rows may begin.

    What a row writes depends on its own text and number alone, so the order of all this has no meaning.
    """

    def submit(self, row: int, max_new_tokens: int) -> None:
        """Begin a call of this row, which `advance` continues beside those of other rows."""
        ...

    def advance(self) -> list[tuple[int, Call]]:
        """Write one more token in each call that was begun; returns the calls that are over, by row."""
        ...

    def extend(self, prompts: Sequence[Sequence[int]], copies: int) -> list[int]:
        """Further rows, as if the session had been opened with these prompts as well; returns their numbers."""
        ...


@dataclass(frozen=True)
class Revived:
    """A row that a session takes over from another one, which is lost. It goes on as it would have done there.

    Attributes:
        number: of the row.
        read: the tokens that were read, piece by piece.
        pending: those still to be read.
        recent: the tokens that it wrote since its last observation.
        calls: number of its calls that are over.
    """

    number: int
    read: tuple[tuple[int, ...], ...]
    pending: tuple[int, ...]
    recent: tuple[int, ...]
    calls: int


def require_prompts(prompts: Sequence[Sequence[int]], max_total_tokens: int) -> None:
    """Raise the ValueError for a prompt that is empty or leaves no room for a token after it."""
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_total_tokens:
            raise ValueError(
                f"prompt {number}: found {len(prompt)} tokens, expected 1 to {max_total_tokens - 1}, so that at least "
                "one token can be written. Shorten the prompt or raise max_total_tokens."
            )


def not_open(row: int, num_rows: int, num_open: int) -> str:
    """The message about a request for a row that is closed or does not exist."""
    if not num_open:
        return f"row {row}: the session is closed, all its {num_rows} rows are. Open a new session."
    state = f"closed, {num_open} other rows are open" if 0 <= row < num_rows else "unknown"
    return f"row {row}: {state}. Expected an open row of 0 to {num_rows - 1}; fork or continue a row before closing it."


class WeightsError(ValueError):
    """A generator cannot take these weights, or holds other weights than the policy; samples would be off-policy."""


Weights = Iterable[tuple[str, Tensor]]
"""Every weight of a policy once, by its name in the exported model; a tensor is valid until the iterator moves on."""


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapters:
    """A policy as its start policy and low-rank changes: W = W_start + scale * B A for some of its weights.

    Attributes:
        names: of these weights in the exported model.
        rank: of all changes.
        scale: of all changes.
        factors: "W/A" [rank, in] and "W/B" [out, rank] for every weight W, each once; a tensor is valid until the
            iterator moves on.
    """

    names: tuple[str, ...]
    rank: int
    scale: float
    factors: Weights


class Generator(Protocol):
    """A model that generates in sessions, and takes new weights between them.

    `shares_weights`: it uses the weights under training themselves, so that it needs no copy after an update.
    `plays_apart`: it computes in processes of its own, so that it may play while the policy learns.
    """

    shares_weights: bool
    plays_apart: bool

    def open(self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int) -> Session:
        """Start `len(prompts) * copies` rows; prompt + response never exceed `max_total_tokens` per row.

        Raises:
            WeightsError: the generator sleeps, or has lost its weights and got no new ones.
        """
        ...

    def update_weights(self, weights: Weights | Adapters) -> None:
        """Take over these weights of the same architecture; caches of old weights are dropped.

        Adapters are added to the weights of the folder from which the generator was started.

        Raises:
            WeightsError: a weight is missing, comes twice, is unknown or has another shape (nothing has changed
                then), or the generator does not compute with the new ones.
        """
        ...

    def sleep(self) -> None:
        """Free device memory for an update. The weights may be lost; play again after `wake` and `update_weights`."""
        ...

    def wake(self) -> None:
        """Take the device memory back; nothing happens if the generator is awake."""
        ...

    def shutdown(self) -> None:
        """Free the model and stop its processes, if any."""
        ...


@runtime_checkable
class FreeGenerator(Generator, Protocol):
    """A generator whose sessions are `FreeSession`s; draws depend on `Sampling.first_row` and not on the session."""

    rows_are_free: bool


class Trainee(Protocol):
    """The part of `tasks.engine.Policy` that a generator may use."""

    @property
    def causal_lm(self) -> Any | None:
        """The model itself, None where this process does not hold the whole model."""
        ...

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs of `sequence[1:]` for each sequence; a generator with a copy of the weights must reproduce them."""
        ...


class GeneratorConf(Protocol):
    """The settings of a generator; `PART` of its file is such a class."""

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> Generator:
        """A generator of the policy in a model folder.

        Args:
            folder: weights and tokenizer.
            dtype: of the forward passes of training; the generator computes in the same dtype.
            trainee: the policy under training, whose first weights are those of the folder.

        Raises:
            ValueError: no model folder, or a model that this kind of generator does not support.
        """
        ...


def started_by(made: GeneratorConf) -> type | None:
    """The class of the generators that these settings start, by the annotation of `start`; None without one."""
    found: type | None = typing.get_type_hints(type(made).start).get("return")
    return found


@runtime_checkable
class Particular(Protocol):
    """A `GeneratorConf` that can say, before a run, which models it does not play."""

    def check_model(self, config: Any) -> None:
        """Raise the ValueError for a model that this kind of generator does not support; `config` is transformers'."""
        ...


TRAIN = "train"
"""A file of `conf/generator/` may have this section beside its own keys. It changes that of the scale."""


def load(name: str, root: Path = conf.ROOT) -> GeneratorConf:
    """The settings of `conf/generator/<name>.yaml`."""
    tree = conf.section("generator", name, root)
    tree.pop(TRAIN, None)
    settings: GeneratorConf = parts.make("generate", tree, f"{conf.CONF}/generator/{name}.yaml")
    return settings


def training_changes(name: str, root: Path = conf.ROOT) -> conf.Tree:
    """What `conf/generator/<name>.yaml` changes of the scale's section `train`; empty where it changes nothing.

    Raises:
        ValueError: the section is no mapping.
    """
    changes = conf.section("generator", name, root).get(TRAIN, {})
    conf.require(isinstance(changes, dict), f"{conf.CONF}/generator/{name}.yaml: {TRAIN}", changes, "settings")
    return dict(changes)


def checked(weights: Weights, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Pass these weights on, and check that they are exactly those of `shapes`.

    Raises:
        WeightsError: a weight is unknown, comes again, has another shape, or holds NaN or infinity; at the end, if one
            is missing.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in shapes:
            raise WeightsError(
                f"new weights: {name} is unknown. Expected the {len(shapes)} weights of the start policy."
            )
        if name in seen:
            raise WeightsError(f"new weights: {name} comes twice. Expected every weight of the policy once.")
        if tuple(tensor.shape) != shapes[name]:
            raise WeightsError(
                f"new weights: {name} has shape {list(tensor.shape)}, expected {list(shapes[name])}. Give the whole "
                f"weight, not a shard of it."
            )
        if not tensor.isfinite().all():
            raise WeightsError(
                f"new weights: {name} holds NaN or infinity, expected finite numbers. The last update has diverged: "
                "lower the learning rate."
            )
        seen.add(name)
        yield name, tensor

    if missing := [name for name in shapes if name not in seen]:
        raise WeightsError(
            f"new weights: {missing[0]} is missing, and {len(missing) - 1} others. Expected every weight of the policy."
        )
