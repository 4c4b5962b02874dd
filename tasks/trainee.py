"""A module that this process trains: float32 weights, AdamW, and the state of both in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tasks import checkpoint
from tasks.precision import FullWeights


class Trainee:
    """A module under training. A subclass adds gradients and then calls `clip` and `take`.

    Args:
        module: on its device.
        body: the part of it that computes in `dtype`.
        dtype: of forward and backward passes; the optimizer works in float32.
        betas, weight_decay: of AdamW.
        is_fused: take its fused kernel.
    """

    def __init__(
        self,
        module: nn.Module,
        body: nn.Module,
        dtype: torch.dtype,
        betas: tuple[float, ...],
        weight_decay: float,
        is_fused: bool,
    ) -> None:
        self.module = module
        self.device = next(module.parameters()).device
        self.dtype = dtype
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._full = FullWeights(trained, body, dtype)
        self.trained = self._full.weights
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=1.0,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            fused=True if is_fused else None,
        )
        self.num_updates = 0

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to this norm; returns the norm that it had."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.trained.values()), max_norm))

    def take(self, lr: float) -> None:
        """Take one optimizer step at this learning rate and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._full.write_back()
        self.num_updates += 1

    def save(self, folder: Path) -> None:
        """Write trained weights, optimizer moments and counters into a new folder."""
        moments, scalars = checkpoint.pack_optimizer(self.optimizer, "optimizer")
        weights = {f"weights/{name}": p for name, p in self.trained.items()}
        values = {"optimizer": scalars, "num_updates": self.num_updates}
        checkpoint.write_state(folder, weights | moments, values)

    def load(self, folder: Path) -> None:
        """Inverse of `save`."""
        tensors, values = checkpoint.read_state(folder)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[f"weights/{name}"])
        self._full.write_back()
        checkpoint.unpack_optimizer(self.optimizer, "optimizer", tensors, values["optimizer"])
        self.num_updates = values["num_updates"]
