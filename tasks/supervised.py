"""Supervised training, one update at a time: what a model learns, and who computes it.

A schedule (`tasks/base/fit.py`, `tasks/reward_model/fit.py`) asks a `Learner` to learn the micro-batches of an update.
`PlainLearner` is this process. An engine of several processes gives another one, which divides model and micro-batches
among them, and of which the schedule knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tasks.model import Dtype, computes_in
from tasks.passes import reading, recompute_activations, recomputing
from tasks.shared_prefix import require_supported
from tasks.trainee import Trainee


class Task(Protocol):
    """What a model learns from examples. It holds only values, so that it can be sent to other processes."""

    @property
    def share_reading(self) -> bool:
        """Whether what examples of a micro-batch begin with in common is read once."""
        ...

    def num_tokens(self, example: Any) -> int:
        """Length of an example."""
        ...

    def __call__(self, model: Any, examples: Sequence[Any], total: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch and its metrics, which carry no gradient.

        Args:
            model: on its device.
            examples: of the micro-batch.
            total: what losses are divided by; those of all micro-batches add up to the update's.
        """
        ...


@dataclass(frozen=True)
class Supervision:
    """What a learner is told. It holds only values.

    Attributes:
        task: see `Task`.
        betas, weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
        dtype: of forward and backward passes; the optimizer works in float32.
        keep_activations: False recomputes layer activations in the backward pass.
    """

    task: Task
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    dtype: Dtype = "float32"
    keep_activations: bool = True


@dataclass(frozen=True)
class Step:
    """The report of one update.

    Attributes:
        metrics: of each micro-batch; an engine may have cut some in two.
        grad_norm: norm of the whole gradient before clipping.
    """

    metrics: tuple[dict[str, float], ...]
    grad_norm: float

    def sum(self, name: str) -> float:
        """A metric of the whole update."""
        return sum_of(self.metrics, name)


class Learner(Protocol):
    """A model under supervised training."""

    @property
    def model(self) -> Any:
        """The model in this process; `bring_back` gives it the weights of the last update."""
        ...

    def learn(self, batches: Sequence[Sequence[Any]], total: float, lr: float) -> Step:
        """Add up the gradients of all micro-batches, take one optimizer step, clear the gradients.

        Args:
            batches: micro-batches of examples.
            total: see `Task`.
            lr: learning rate of this update.
        """
        ...

    def measure(self, batches: Sequence[Sequence[Any]]) -> Sequence[dict[str, float]]:
        """Metrics of micro-batches, without learning."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, by its name in the model; a tensor is valid until the iterator moves on."""
        ...

    def bring_back(self) -> None:
        """Give `model` the weights as they are after the last update."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that `load` needs to continue exactly into a new folder."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`, of any learner."""
        ...


@runtime_checkable
class Divides(Protocol):
    """An engine that also divides supervised training."""

    def learner(self, model: Any, told: Supervision) -> AbstractContextManager[Learner]:
        """A learner that begins with the weights of a model in the memory of this process."""
        ...


@contextmanager
def opened(model: Any, told: Supervision, engine: Divides | None) -> Iterator[Learner]:
    """A learner of this model: that of the engine, or this process; it is freed when the block ends."""
    if engine is None:
        yield PlainLearner(model, told)
        return
    with engine.learner(model, told) as learner:
        yield learner


class PlainLearner(Trainee):
    """See `Learner`: this process, on the device where the model is.

    Args:
        model: trained in place.
        told: settings.

    Raises:
        ValueError: an architecture that cannot share what it reads.
    """

    def __init__(self, model: Any, told: Supervision) -> None:
        if told.task.share_reading:
            require_supported(model.get_decoder())
        if not told.keep_activations:
            recompute_activations(model)
        self.model, self.told = model, told
        dtype = computes_in(told.dtype, next(model.parameters()).device)
        super().__init__(model, model, dtype, told.betas, told.weight_decay, is_fused=dtype == torch.bfloat16)

    def learn(self, batches: Sequence[Sequence[Any]], total: float, lr: float) -> Step:
        """See `Learner.learn`."""
        metrics = []
        for examples in batches:
            with self.reading():
                with nullcontext() if self.told.keep_activations else recomputing(self.model):
                    loss, found = self.told.task(self.model, examples, total)
                loss.backward()
            metrics.append(numbers(found))

        norm = self.clip(self.told.max_grad_norm)
        self.take(lr)
        return Step(tuple(metrics), norm)

    @torch.no_grad()
    def measure(self, batches: Sequence[Sequence[Any]]) -> list[dict[str, float]]:
        """See `Learner.measure`."""
        with self.reading():
            return [numbers(self.told.task(self.model, examples, 1.0)[1]) for examples in batches]

    def reading(self) -> AbstractContextManager[None]:
        """The block of a forward pass and its backward pass."""
        return reading(self.model.get_decoder(), self.told.task.share_reading, self.dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    def bring_back(self) -> None:
        """The model is trained in place."""


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics as they are reported."""
    return {name: float(value) for name, value in metrics.items()}


def sum_of(metrics: Sequence[Mapping[str, float]], name: str) -> float:
    """A metric of all micro-batches together."""
    return sum(of_one[name] for of_one in metrics)
