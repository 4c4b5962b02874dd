"""The engine: forward and backward passes, optimizer steps and the state of a policy and its critic.

`plain.py` is one process on one device. An engine for many devices (DeepSpeed) would have the same protocol, which is
all that the training loop uses. The engine owns the loop over micro-batches, so that it may run several of them at
once. Engines know tensors, never methods, rewards or files of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from tasks import conf, parts
from tasks.conf import LearningRate, require
from tasks.generate import Adapters
from tasks.limits import Limit
from tasks.model import Dtype, LoraConf
from tasks.rl.experience import Experience
from tasks.rl.losses import Normalizer

LOGIT_CHUNK = {"cpu": 2**24, "cuda": 2**28}
"""Most logits that an engine holds at once, by device; on a GPU each chunk casts the head, so chunks are large."""
Sharing = bool | Literal["longest"]
"""What samples of a micro-batch share: nothing, their prefixes, or every common beginning."""
Plan = Sequence[Sequence[int]]  # Micro-batches, each a list of rows of the experience.


class DivergedError(ValueError):
    """The gradient is not finite, so training cannot go on. The weights are those before this update."""


@dataclass(frozen=True)
class OptimizerConf:
    """AdamW with a constant learning rate after a linear warm-up.

    Attributes:
        lr: learning rate after warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        betas: of AdamW.
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
    """

    lr: LearningRate
    warmup_steps: NonNegativeInt
    betas: tuple[float, ...]
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat

    def __post_init__(self) -> None:
        are_shares = len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        require(are_shares, "betas", self.betas, "two numbers in [0, 1)")


class PolicyLoss(Protocol):
    """The policy's loss of one micro-batch and its metrics; `logprobs` and `entropy` are [B, T]."""

    def __call__(
        self, batch: Experience, logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class ValueLoss(Protocol):
    """The critic's loss of one micro-batch; `values` is [B, T]."""

    def __call__(self, batch: Experience, values: Tensor, normalizer: Normalizer) -> Tensor: ...


L = TypeVar("L", PolicyLoss, ValueLoss)


@dataclass(frozen=True)
class Objective(Generic[L]):
    """What one update minimises. It holds only values, so that it can be pickled and sent to other processes.

    Attributes:
        loss: of a micro-batch; the losses of all micro-batches add up to the update's.
        normalizer: the denominators of the whole mini-batch.
        entropy_gradient: whether the entropy carries gradient; False saves work where the loss only reports it.
        is_first: no update came before, so the logprobs of this update's forward pass are the old logprobs.
    """

    loss: L
    normalizer: Normalizer
    entropy_gradient: bool = True
    is_first: bool = False


@dataclass(frozen=True)
class Update:
    """The report of one update.

    Attributes:
        metrics: of each micro-batch, in the order of the plan; the sum over micro-batches is the mini-batch's metric.
        grad_norm: norm of the whole gradient before clipping.
        logprobs: [N, T] old logprobs if `Objective.is_first` took them from this update, 0 in rows outside the plan;
            else None.
    """

    metrics: tuple[dict[str, float], ...]
    grad_norm: float
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class Training:
    """The settings of a run that an engine needs.

    Attributes:
        policy: optimizer of the policy.
        critic: optimizer of the critic; None where the method needs no critic.
        lora: adapters; the reference is then the policy without them.
        dtype: of forward passes.
        keep_activations: False recomputes layer activations in the backward pass (gradient checkpointing).
        needs_reference: keep a frozen copy of the start policy.
        seed: of adapters' random start.
        share_prefixes: read a prefix once for all its samples in a micro-batch; `longest`: every common beginning.
    """

    policy: OptimizerConf
    critic: OptimizerConf | None
    lora: LoraConf
    dtype: Dtype
    keep_activations: bool
    needs_reference: bool
    seed: int
    share_prefixes: Sharing = False


class Policy(Protocol):
    """A causal LM under training. A plan is a list of micro-batches, each a list of row numbers."""

    @property
    def causal_lm(self) -> Any | None:
        """The model itself, for a generator that shares the weights under training.

        None where this process does not hold the whole model.
        """
        ...

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs of `sequence[1:]` for each sequence; a generator with a copy of the weights must reproduce them."""
        ...

    def logprobs(self, experience: Experience, plan: Plan, reference: bool = False) -> Tensor:
        """[N, T] natural log of each generated token under the current (or the frozen start) policy, no gradient.

        Rows outside the plan, and tokens the policy did not write, are 0.
        """
        ...

    def update(self, experience: Experience, plan: Plan, objective: Objective[PolicyLoss]) -> Update:
        """Add up the gradients of all micro-batches, take one optimizer step, clear the gradients.

        Raises:
            DivergedError: the gradient is not finite; the weights have not moved.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the policy once, adapters merged, by its name in the exported model.

        A tensor is valid until the iterator moves on.
        """
        ...

    def adapters(self) -> Adapters | None:
        """What training has changed, where it trains adapters; None where it trains all weights."""
        ...

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face model folder (weights and tokenizer; adapters merged)."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that `load` needs to continue exactly into a new folder, in the engine's own files."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`."""
        ...


@runtime_checkable
class Limited(Protocol):
    """A `Policy` that can say what its devices could do; the report then shows which share of that learning took."""

    def limits(self) -> list[Limit]:
        """Of each device that learns, in the type of its matrix products; all devices are busy meanwhile."""
        ...


class Critic(Protocol):
    """A value function under training."""

    def values(self, experience: Experience, plan: Plan) -> Tensor:
        """[N, T] estimate before each response token, no gradient; 0 elsewhere and in rows outside the plan."""
        ...

    def update(self, experience: Experience, plan: Plan, objective: Objective[ValueLoss]) -> Update:
        """As `Policy.update`; the metric is `value_loss`."""
        ...

    def save(self, folder: Path) -> None:
        """As `Policy.save`."""
        ...

    def load(self, folder: Path) -> None:
        """As `Policy.load`."""
        ...


class Engine(Protocol):
    """The settings of an engine; `PART` of its file is such a class.

    One of several processes may also divide supervised training: see `tasks.supervised.Divides`.
    """

    def open(self, folder: Path, training: Training) -> AbstractContextManager[tuple[Policy, Critic | None]]:
        """Policy and critic, both made from the start policy in a model folder. They are freed when the block ends.

        Raises:
            DataError: the folder is no model folder.
        """
        ...


def load(name: str, root: Path = conf.ROOT) -> Engine:
    """The engine of `conf/engine/<name>.yaml`."""
    tree = conf.section("engine", name, root)
    engine: Engine = parts.make("engine", tree, f"{conf.CONF}/engine/{name}.yaml")
    return engine
