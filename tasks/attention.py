"""Attention for models whose query heads share key and value heads, without a copy of keys and values per query head.

The libraries repeat each key and value head for all query heads that read it, which on a CPU costs most of a decode
step. Here the query heads of a group stand behind one another as if they were further positions, so that one call reads
the keys and values once. The result is the same up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GROUPED = "grouped"
"""Of `attend_grouped` among the attentions of transformers."""


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float | None = None) -> Tensor:
    """Scaled dot-product attention with a mask.

    Args:
        query: [n, heads, c, head_dim].
        key, value: [n, groups, s, head_dim]; query head h reads group h // (heads / groups).
        seen: [n or 1, 1, c, s], True where position c attends to position s.
        scaling: of the scores; None is 1 / sqrt(head_dim).

    Returns:
        [n, heads, c, head_dim]
    """
    times = query.shape[1] // key.shape[1]
    if times > 1:
        seen = seen.repeat(1, 1, times, 1)
    folded = query.reshape(*key.shape[:2], times * query.shape[2], query.shape[3])
    attended: Tensor = scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scaling)
    return attended.reshape(query.shape)


def attend_grouped(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`grouped_attention` as transformers calls it; returns [n, c, heads, head_dim]."""
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


@contextmanager
def attending(decoder: Any, name: str, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let a decoder of transformers use this attention inside the block."""
    from tasks.pretrained import AttentionInterface

    AttentionInterface.register(name, attend)
    config = decoder.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
