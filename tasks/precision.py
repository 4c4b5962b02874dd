"""Training in bfloat16: forward and backward passes in bfloat16, sums and steps in float32.

The weights that compute are rounded copies of float32 weights, which the optimizer changes. A gradient leaves the
rounded weight as soon as the backward pass of a micro-batch has made it, and is added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class FullWeights:
    """Float32 copies of the trained parameters of a module, which then computes in `dtype`.

    Parameters that stay float32 are their own copies, so that a module in float32 costs nothing more.

    Args:
        trained: the parameters, still in float32.
        body: the part of the module that computes in `dtype`; it is converted.
        dtype: float32 or bfloat16.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], body: nn.Module, dtype: torch.dtype) -> None:
        copies = {}
        if dtype != torch.float32:
            copies = {name: parameter.detach().clone() for name, parameter in trained.items()}
            round_weights(body, dtype)
        self._rounded = {name: parameter for name, parameter in trained.items() if parameter.dtype == torch.bfloat16}
        self.weights = {
            name: nn.Parameter(copies[name]) if name in self._rounded else parameter
            for name, parameter in trained.items()
        }
        for name, parameter in self._rounded.items():
            parameter.register_post_accumulate_grad_hook(_moving_gradient_to(self.weights[name]))

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the weights into the module, after a step of the optimizer."""
        for name, parameter in self._rounded.items():
            parameter.copy_(self.weights[name])


def round_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute in this dtype, as one that was loaded in it: its buffers stay as they are.

    `module.to(dtype)` would round the frequencies of rotary embeddings, too, and so shift the angles of later
    positions, by up to 0.4 at position 300 with a base of 100,000.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _moving_gradient_to(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if weight.grad is None:
            weight.grad = parameter.grad.float()
        else:
            weight.grad += parameter.grad
        parameter.grad = None

    return move
