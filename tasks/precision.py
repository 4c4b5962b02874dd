"""Training in bfloat16: forward and backward passes in bfloat16, sums and steps in float32.

The weights that compute are rounded copies of float32 weights, which the optimizer changes. A gradient leaves the
rounded weight as soon as the backward pass of a micro-batch has made it, and is added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

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
            body.to(dtype)
            ease_norms(body)
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


def _moving_gradient_to(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if weight.grad is None:
            weight.grad = parameter.grad.float()
        else:
            weight.grad += parameter.grad
        parameter.grad = None

    return move


def ease_norms(module: nn.Module) -> None:
    """Let the RMS norms of a module of transformers take `RmsNorm`, whose forward pass has the same bits.

    Torch's own backward pass of the norm's eight operations takes ten times as long on a CPU.
    """
    for norm in module.modules():
        if type(norm).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm"):
            norm.forward = MethodType(_rms_norm, norm)  # type: ignore[method-assign]


def _rms_norm(norm: nn.Module, states: Tensor) -> Tensor:
    normed: Tensor = RmsNorm.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 and rounded before the weight.

    Root Mean Square Layer Normalization (arXiv 1910.07467), Eq. 4
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = states.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normed = (wide * inverse).to(states.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        return weight * normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        of_weight = (gradient * normed).flatten(0, -2).sum(0, dtype=torch.float32)
        of_normed = gradient * weight
        along = (of_normed * normed).sum(-1, keepdim=True, dtype=torch.float32) / normed.shape[-1]
        of_states = (of_normed - normed * along) * inverse
        return of_states.to(gradient.dtype), of_weight.to(weight.dtype), None
