"""Forward, backward, optimizer step, state: what a trainer asks of the hardware.

`plain.py` is one process on one device. An engine for many (DeepSpeed) answers the same protocol; the
training loop knows no other. Engines know tensors, never methods, rewards or files of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from tasks.conf import require
from tasks.rl.experience import Experience

Dtype = Literal["auto", "float32", "bfloat16"]


class DivergedError(ValueError):
    """Training cannot go on: gradients are not finite. The weights are those of the update before."""


@dataclass(frozen=True)
class OptimizerConf:
    """AdamW with a constant rate after a linear warm-up.

    Attributes:
        lr: learning rate after warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        betas: of AdamW.
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
    """

    lr: float
    warmup_steps: int
    betas: tuple[float, ...]
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", self.lr, "a positive number")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        are_shares = len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        require(are_shares, "betas", self.betas, "two numbers in [0, 1)")
        require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "a positive number")


class Policy(Protocol):
    """A causal LM under training."""

    def logprobs(self, batch: Experience, reference: bool = False) -> Tensor:
        """[B, T] natural log of each generated token under the current (or the frozen start) policy, no gradient."""
        ...

    def accumulate(
        self,
        batch: Experience,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
        entropy_gradient: bool = True,
    ) -> dict[str, float]:
        """Forward one micro-batch, call `loss(logprobs [B, T], entropy [B, T])`, add its gradient; returns its metrics.

        `entropy_gradient`: whether the entropy carries gradient; a loss that only reports it saves the work.
        """
        ...

    def step(self) -> float:
        """One optimizer step on the accumulated gradients, then cleared; returns their norm before clipping."""
        ...

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face model folder (weights and tokenizer; adapters merged)."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON-ready values that `restore` continues from exactly."""
        ...

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Inverse of `state`."""
        ...


class Critic(Protocol):
    """A value function under training."""

    def values(self, batch: Experience) -> Tensor:
        """[B, T] estimate before each response token, no gradient; 0 elsewhere."""
        ...

    def accumulate(self, batch: Experience, loss: Callable[[Tensor], Tensor]) -> float:
        """Forward one micro-batch, call `loss(values [B, T])`, add its gradient; returns the loss."""
        ...

    def step(self) -> float:
        """As `Policy.step`."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `Policy.state`."""
        ...

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """As `Policy.restore`."""
        ...
