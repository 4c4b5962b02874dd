"""Trains a reward model: updates, a look at the validation loss now and then, an early end, exact resume.

A training that was killed goes on from its last checkpoint and gives the same weights. Who computes an update, this
process or several, is left to a `Learner` (`tasks/supervised.py`).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks import checkpoint
from tasks.model import Dtype, computes_in
from tasks.reward_model.losses import losses
from tasks.reward_model.model import packs, place_logits
from tasks.reward_model.reading import Encoded
from tasks.reward_model.settings import FitConf, LossConf
from tasks.supervised import Learner, Supervision, sum_of

Log = Callable[[int, dict[str, float]], None]
KEPT_LOOKS = 2
LEARNER = "learner"
"""Folder of a checkpoint."""


@dataclass(frozen=True)
class Labelled:
    """One trajectory to learn from.

    Attributes:
        encoded: its tokens and places.
        pivots: of each executed search, in order.
        is_right: whether its answer is right.
    """

    encoded: Encoded
    pivots: tuple[bool, ...]
    is_right: bool


@dataclass(frozen=True)
class Known(Labelled):
    """A labelled trajectory with the golden hops of its question."""

    hops: int = 1


@dataclass(frozen=True)
class Potentials:
    """The task (see `Task`): f at the places of packed trajectories; `final` and `gold` are sums over these.

    Attributes:
        loss: settings.
        dtype: in which the model computes with float32 weights.
        share_reading: trajectories of a row share nothing.
    """

    loss: LossConf
    dtype: Dtype
    share_reading: bool = False

    def num_tokens(self, example: Labelled) -> int:
        """See `Task.num_tokens`."""
        return len(example.encoded)

    def __call__(self, model: Any, examples: Sequence[Labelled], total: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Task`."""
        with self._autocast(model):
            logits = place_logits(model, [one.encoded for one in examples])
        pairs = [
            losses(of_one, one.pivots, one.is_right, self.loss) for of_one, one in zip(logits, examples, strict=True)
        ]
        final, gold = (torch.stack(of_kind).sum() for of_kind in zip(*pairs, strict=True))
        loss = (final + self.loss.gold_weight * gold) / total
        return loss, {"final": final.detach(), "gold": gold.detach()}

    def _autocast(self, model: Any) -> AbstractContextManager[Any]:
        device = next(model.parameters()).device
        dtype = computes_in(self.dtype, device)
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def supervision(loss: LossConf, conf: FitConf) -> Supervision:
    """What the learner of a `Fit` is told."""
    return Supervision(
        Potentials(loss, conf.dtype),
        betas=(0.9, 0.95),
        weight_decay=conf.weight_decay,
        max_grad_norm=conf.max_grad_norm,
        keep_activations=conf.keep_activations,
    )


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        step: updates done.
        best_step, best_loss: the smallest validation loss, and after which update it was found.
        history: metrics by step.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    history: list[dict[str, Any]] = field(default_factory=list)

    def num_looks_since_best(self) -> int:
        """Validations after the best one."""
        return sum("validation_loss" in row["metrics"] and row["step"] > self.best_step for row in self.history)


class Fit:
    """One training run.

    Args:
        learner: trains a reward model, which ends with the best weights; told by `supervision`.
        loss, conf: settings.
        training, validation: trajectories.
        seed: of their order.
        scratch: folder of checkpoints.
        log: receives (step, metrics).
        max_steps: updates at most; 0 takes what `max_epochs` gives.
    """

    def __init__(
        self,
        learner: Learner,
        loss: LossConf,
        conf: FitConf,
        training: Sequence[Labelled],
        validation: Sequence[Labelled],
        seed: str,
        scratch: Path,
        log: Log,
        max_steps: int = 0,
    ) -> None:
        self.learner, self.model = learner, learner.model
        self.loss, self.conf = loss, conf
        self.training, self.validation, self.seed = training, validation, seed
        self.scratch, self.log = scratch, log
        self.num_steps = max_steps or num_steps(len(training), conf)
        self.progress = Progress()
        self.best = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

        newest = checkpoint.latest(scratch)
        if newest is not None:
            self._restore(newest)

    def run(self) -> Progress:
        """Train to the end.

        Raises:
            ValueError: the loss is not a finite number.
        """
        while self.progress.step < self.num_steps and not self._is_over():
            self._update()
            step = self.progress.step
            if step % self.conf.validate_every == 0 or step == self.num_steps:
                self._look()
                self._save()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.best[name])
        self.model.eval()
        return self.progress

    def _is_over(self) -> bool:
        return self.progress.num_looks_since_best() >= self.conf.patience

    def _update(self) -> None:
        """One update on the next batch."""
        step = self.progress.step
        batch, lr = self._batch(step), self.conf.lr * schedule(step, self.num_steps, self.conf)
        taken = self.learner.learn(self._rows(batch), len(batch), lr)

        metrics = {f"loss_{name}": taken.sum(name) / len(batch) for name in ("final", "gold")}
        metrics |= {
            "loss": metrics["loss_final"] + self.loss.gold_weight * metrics["loss_gold"],
            "grad_norm": taken.grad_norm,
        }
        if not all(map(math.isfinite, metrics.values())):
            raise ValueError(f"reward model: the loss or its gradient became {metrics} at update {step + 1}. Lower lr.")
        self.progress.step += 1
        self._report(metrics)

    def _batch(self, step: int) -> list[Labelled]:
        """The trajectories of an update: each epoch has its own seeded order."""
        batch = min(self.conf.batch, len(self.training))
        per_epoch = math.ceil(len(self.training) / batch)
        epoch, place = divmod(step, per_epoch)
        order = list(range(len(self.training)))
        random.Random(f"{self.seed}/order/{epoch}").shuffle(order)
        return [self.training[i] for i in order[place * batch : (place + 1) * batch]]

    def _rows(self, batch: Sequence[Labelled]) -> list[list[Labelled]]:
        """The trajectories of one packed row after another."""
        rows = packs([len(one.encoded) for one in batch], self.conf.max_pack_tokens)
        return [[batch[number] for number in row] for row in rows]

    def _look(self) -> None:
        """Measure the validation loss, and keep the weights if they are the best so far."""
        measured = self.learner.measure(self._rows(self.validation))
        final, gold = (sum_of(measured, name) / len(self.validation) for name in ("final", "gold"))
        loss = final + self.loss.gold_weight * gold
        if loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.best_step = loss, self.progress.step
            self.best = {name: tensor.clone() for name, tensor in self.learner.weights()}
        self._report({"validation_loss": loss, "validation_loss_final": final, "validation_loss_gold": gold})

    def _report(self, metrics: dict[str, float]) -> None:
        step, history = self.progress.step, self.progress.history
        if history and history[-1]["step"] == step:
            history[-1]["metrics"] |= metrics
        else:
            history.append({"step": step, "metrics": dict(metrics)})
        self.log(step, metrics)

    def _save(self) -> None:
        best = {f"best/{name}": tensor for name, tensor in self.best.items()}
        one = self.progress
        with checkpoint.writing(self.scratch, one.step, KEPT_LOOKS) as folder:
            self.learner.save(folder / LEARNER)
            checkpoint.write_state(folder, best, {"best": [one.best_step, one.best_loss], "history": one.history})

    def _restore(self, folder: Path) -> None:
        self.learner.load(folder / LEARNER)
        tensors, values = checkpoint.read_state(folder)
        for name, tensor in self.best.items():
            tensor.copy_(tensors[f"best/{name}"])
        best_step, best_loss = values["best"]
        self.progress = Progress(int(folder.name.rpartition("-")[2]), best_step, best_loss, values["history"])


def num_steps(num_trajectories: int, conf: FitConf) -> int:
    """Updates of all epochs."""
    return conf.max_epochs * math.ceil(num_trajectories / min(conf.batch, num_trajectories))


def schedule(step: int, num_steps: int, conf: FitConf) -> float:
    """The share of the peak learning rate at an update: a linear rise, then a cosine down to `floor`."""
    warm = max(1, round(conf.warmup_share * num_steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return conf.floor + (1 - conf.floor) * 0.5 * (1 + math.cos(math.pi * done))
