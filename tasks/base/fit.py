"""Supervised training of a start policy or a reader: one loop, phases that stop at a loss, exact resume.

It is no general trainer: reinforcement learning has its own loop in `tasks/train`. Who computes an update, this process
or several, is left to a `Learner` (`tasks/supervised.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from tasks import checkpoint
from tasks.base.demonstrations import Example
from tasks.conf import LearningRate
from tasks.model import Dtype
from tasks.shared_prefix import common_beginning, hidden_states
from tasks.store import read_json, write_json
from tasks.supervised import Learner, Supervision

LOG_EVERY = 10
LEARNER, PROGRESS = "learner", "progress.json"
"""In a checkpoint: the folder of the learner, and how far the training is."""


@dataclass(frozen=True)
class PhaseConf:
    """One phase of supervised training.

    Attributes:
        max_steps: at most this many optimizer steps.
        batch: examples per step.
        lr: learning rate, times a linear warm-up over the phase's first 20 steps, so a shorter phase stays below it.
        decay: whether the learning rate falls linearly to a tenth over `max_steps`.
        stop_loss: the phase ends when the mean loss of 20 steps falls below this; 0 never ends it.
    """

    max_steps: NonNegativeInt
    batch: PositiveInt
    lr: LearningRate
    decay: bool
    stop_loss: NonNegativeFloat


@dataclass(frozen=True)
class Responses:
    """The task (see `Task`): the tokens of responses that are in their masks.

    Attributes:
        share_reading: read what examples of a micro-batch begin with in common once.
    """

    share_reading: bool = False

    def num_tokens(self, example: Example) -> int:
        """See `Task.num_tokens`."""
        return len(example.prompt_ids) + len(example.response_ids)

    def __call__(self, model: Any, examples: Sequence[Example], total: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Task`."""
        loss = supervised_loss(model, examples, self.share_reading) / total
        return loss, {"loss": loss.detach()}


def supervision(dtype: Dtype = "float32", share_reading: bool = False) -> Supervision:
    """What the learner of a `Fit` is told.

    Args:
        dtype: of forward and backward passes; the optimizer works in float32.
        share_reading: read what examples begin with in common once for all of a forward.
    """
    return Supervision(Responses(share_reading), betas=(0.9, 0.98), weight_decay=0.01, max_grad_norm=1.0, dtype=dtype)


class Fit:
    """Runs phases one after another on one model and optimizer; progress is kept in `scratch`.

    Args:
        learner: trains a causal LM; told by `supervision`.
        scratch: folder of this fit's checkpoints.
        checkpoint_every: optimizer steps between checkpoints.
        max_batch_tokens: tokens of one forward, padding included; a step's examples are spread over several.
        log: receives (step over all phases, metrics) after every step; metrics are empty but every `LOG_EVERY` steps.
        share_reading: as the learner was told; what examples begin with in common then counts once.
    """

    def __init__(
        self,
        learner: Learner,
        scratch: Path,
        checkpoint_every: int,
        max_batch_tokens: int,
        log: Callable[[int, dict[str, float]], None],
        share_reading: bool = False,
    ) -> None:
        self.learner, self.model = learner, learner.model
        self.scratch = scratch
        self.checkpoint_every = checkpoint_every
        self.max_batch_tokens = max_batch_tokens
        self.log = log
        self.share_reading = share_reading

        self.step = 0
        self.finished: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.phase_step = 0
        self.recent: list[float] = []

        newest = checkpoint.latest(scratch)
        if newest is not None:
            self._restore(newest)

    def run(self, name: str, conf: PhaseConf, sample: Callable[[int], Sequence[Example]]) -> None:
        """Train phase `name`; `sample(step in phase)` gives a step's examples and must depend on nothing else."""
        if name in self.finished:
            return
        self.model.train()
        while self.phase_step < conf.max_steps and not self._done(conf):
            loss = self._update(conf, sample(self.phase_step))
            self.recent = [*self.recent, loss][-20:]
            self.phase_step += 1
            self.step += 1

            metrics = {"loss": loss, f"loss_{name}": loss} if self.step % LOG_EVERY == 0 else {}
            if metrics:
                self.history.append({"step": self.step, "metrics": metrics})
            self.log(self.step, metrics)
            if self.step % self.checkpoint_every == 0:
                self._save()

        self.finished.append(name)
        self.phase_step, self.recent = 0, []
        self._save()
        self.learner.bring_back()

    def _done(self, conf: PhaseConf) -> bool:
        return len(self.recent) == 20 and sum(self.recent) / 20 < conf.stop_loss

    def _update(self, conf: PhaseConf, examples: Sequence[Example]) -> float:
        warm = min(1.0, (self.phase_step + 1) / 20)
        decay = 1 - 0.9 * self.phase_step / conf.max_steps if conf.decay else 1.0
        total = sum(sum(e.loss_mask) for e in examples)
        common = common_beginning([e.prompt_ids for e in examples]) if self.share_reading else 0
        batches = by_length(examples, self.max_batch_tokens, common)

        value = self.learner.learn(batches, total, conf.lr * warm * decay).sum("loss")
        if not math.isfinite(value):
            raise ValueError(
                f"supervised training: the loss became {value} at step {self.step}. Lower lr in conf/scale."
            )
        return value

    def _save(self) -> None:
        values = {
            "step": self.step,
            "finished": self.finished,
            "phase_step": self.phase_step,
            "recent": self.recent,
            "history": self.history,
        }
        with checkpoint.writing(self.scratch, self.step) as folder:
            self.learner.save(folder / LEARNER)
            write_json(folder / PROGRESS, values)

    def _restore(self, folder: Path) -> None:
        self.learner.load(folder / LEARNER)
        self.learner.bring_back()
        values = read_json(folder / PROGRESS)
        self.step, self.phase_step = values["step"], values["phase_step"]
        self.finished, self.recent, self.history = values["finished"], values["recent"], values["history"]


def by_length(examples: Sequence[Example], max_tokens: int, common: int = 0) -> list[list[Example]]:
    """Batches of examples of similar length, each at most `max_tokens` with its padding; a longer example is alone.

    The first `common` tokens of a batch's examples count once.
    """
    batches: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.prompt_ids) + len(e.response_ids)):
        width = len(example.prompt_ids) + len(example.response_ids)
        if not batches or common + (len(batches[-1]) + 1) * (width - common) > max_tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def supervised_loss(model: Any, examples: Sequence[Example], share_reading: bool = False) -> Tensor:
    """Summed cross-entropy of the response tokens in the mask; computes no other logits.

    Examples are a right-padded batch, or with `share_reading` one row in which common beginnings stand once
    (`tasks/shared_prefix.py`, inside whose attention this is called then).
    """
    rows = [torch.tensor(e.prompt_ids + e.response_ids) for e in examples]
    masks = [torch.tensor((False,) * len(e.prompt_ids) + e.loss_mask) for e in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)  # [B, T]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)[:, 1:].to(model.device)  # [B, T-1]: t predicts t+1

    decoder = model.get_decoder()
    if share_reading:
        hidden = hidden_states(decoder, ids, torch.tensor([len(row) for row in rows]))
    else:
        hidden = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[mask])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][mask], reduction="sum")
