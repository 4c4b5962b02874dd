"""The norm whose backward pass is written out, against what autograd derives."""

import pytest
import torch
from torch import Tensor

from tasks.precision import RmsNorm, ease_norms

SHAPE = (3, 5, 16)


def derived(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps))


def test_gradients_are_those_of_the_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    states, weight, outer = (torch.randn(shape, generator=draw) for shape in (SHAPE, SHAPE[-1:], SHAPE))
    found = []
    for norm in (RmsNorm.apply, derived):
        x, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        out = norm(x, w, 1e-5)  # type: ignore[no-untyped-call]
        found.append((out, *torch.autograd.grad(out, (x, w), outer)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(SHAPE[-1]).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.2, generator=torch.Generator().manual_seed(1))
    states = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = norm(states)
    ease_norms(torch.nn.ModuleDict({"norm": norm}))
    after = norm(states)
    assert after.grad_fn is not None
    assert "RmsNorm" in type(after.grad_fn).__name__
    assert torch.equal(after, before)
