"""Trains a reward model: updates, a look at the validation loss now and then, an early end, exact resume.

A training that was killed goes on from its last checkpoint and gives the same weights.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks import checkpoint
from tasks.model import computes_in
from tasks.reward_model.losses import losses
from tasks.reward_model.model import packs, place_logits
from tasks.reward_model.reading import Encoded
from tasks.reward_model.settings import FitConf, LossConf

Log = Callable[[int, dict[str, float]], None]
KEPT_LOOKS = 2


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
        model: reward model on its device, trained in place; it ends with the best weights.
        loss, conf: settings.
        training, validation: trajectories.
        seed: of their order.
        scratch: folder of checkpoints.
        log: receives (step, metrics).
        max_steps: updates at most; 0 takes what `max_epochs` gives.
    """

    def __init__(
        self,
        model: Any,
        loss: LossConf,
        conf: FitConf,
        training: Sequence[Labelled],
        validation: Sequence[Labelled],
        seed: str,
        scratch: Path,
        log: Log,
        max_steps: int = 0,
    ) -> None:
        self.model, self.loss, self.conf = model, loss, conf
        self.training, self.validation, self.seed = training, validation, seed
        self.scratch, self.log = scratch, log
        self.num_steps = max_steps or num_steps(len(training), conf)
        self.progress = Progress()
        self.best = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=conf.lr, betas=(0.9, 0.95), weight_decay=conf.weight_decay
        )
        if not conf.keep_activations:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
        for group in self.optimizer.param_groups:
            group["lr"] = self.conf.lr * schedule(step, self.num_steps, self.conf)

        self.optimizer.zero_grad(set_to_none=True)
        batch = self._batch(step)
        sums = dict.fromkeys(("final", "gold"), 0.0)
        with self._recomputing():
            for final, gold in self._each_loss(batch):
                ((final + self.loss.gold_weight * gold) / len(batch)).backward()
                sums["final"] += float(final.detach())
                sums["gold"] += float(gold.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.conf.max_grad_norm))

        metrics = {f"loss_{name}": value / len(batch) for name, value in sums.items()}
        metrics |= {"loss": metrics["loss_final"] + self.loss.gold_weight * metrics["loss_gold"], "grad_norm": norm}
        if not all(map(math.isfinite, metrics.values())):
            raise ValueError(f"reward model: the loss or its gradient became {metrics} at update {step + 1}. Lower lr.")
        self.optimizer.step()
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

    def _each_loss(self, batch: Sequence[Labelled]) -> Iterator[tuple[Tensor, Tensor]]:
        """L_final and L_gold, summed over the trajectories of one packed row after another."""
        for row in packs([len(one.encoded) for one in batch], self.conf.max_pack_tokens):
            chosen = [batch[i] for i in row]
            with self._autocast():
                logits = place_logits(self.model, [one.encoded for one in chosen])
            pairs = [
                losses(of_one, one.pivots, one.is_right, self.loss) for of_one, one in zip(logits, chosen, strict=True)
            ]
            yield torch.stack([final for final, _ in pairs]).sum(), torch.stack([gold for _, gold in pairs]).sum()

    @torch.no_grad()
    def _look(self) -> None:
        """Measure the validation loss, and keep the weights if they are the best so far."""
        sums = [(float(final), float(gold)) for final, gold in self._each_loss(self.validation)]
        final, gold = (sum(values) / len(self.validation) for values in zip(*sums, strict=True))
        loss = final + self.loss.gold_weight * gold
        if loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.best_step = loss, self.progress.step
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self._report({"validation_loss": loss, "validation_loss_final": final, "validation_loss_gold": gold})

    def _report(self, metrics: dict[str, float]) -> None:
        step, history = self.progress.step, self.progress.history
        if history and history[-1]["step"] == step:
            history[-1]["metrics"] |= metrics
        else:
            history.append({"step": step, "metrics": dict(metrics)})
        self.log(step, metrics)

    def _autocast(self) -> AbstractContextManager[Any]:
        device = next(self.model.parameters()).device
        dtype = computes_in(self.conf.dtype, device)
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Layers recompute activations only in training mode; their children keep their mode, so dropout stays off."""
        from tasks.pretrained import GradientCheckpointingLayer

        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = not self.conf.keep_activations
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def _save(self) -> None:
        moments, scalars = checkpoint.pack_optimizer(self.optimizer, "optimizer")
        weights = {f"model/{name}": tensor for name, tensor in self.model.named_parameters()}
        best = {f"best/{name}": tensor for name, tensor in self.best.items()}
        one = self.progress
        values = {"optimizer": scalars, "best": [one.best_step, one.best_loss], "history": one.history}
        with checkpoint.writing(self.scratch, one.step, KEPT_LOOKS) as folder:
            checkpoint.write_state(folder, weights | best | moments, values)

    def _restore(self, folder: Path) -> None:
        tensors, values = checkpoint.read_state(folder)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model/{name}"])
                self.best[name].copy_(tensors[f"best/{name}"])
        checkpoint.unpack_optimizer(self.optimizer, "optimizer", tensors, values["optimizer"])
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
