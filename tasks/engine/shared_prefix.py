"""Reads samples that share a prefix in one row: the prefix once, then each sample's own tokens, its branch.

A branch attends to its prefix and to itself, at the positions that it has in its sample. So hidden states and gradients
are those of separate rows, except for the order of additions in floating point. Rollouts of a question share their
prompt; candidates for a turn share all turns before it.

The decoder must pass keyword arguments on to its attention, as those of transformers do; `require_supported` tries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tasks.rl.experience import Experience, prefix_groups

_NAME = "shared_prefix"
"""Of this attention among those of transformers."""


@dataclass(frozen=True)
class _Tree:
    """The places of one prefix and its branches in the packed row.

    Attributes:
        start, stop: of the prefix.
        places: [K, C] of the branches' tokens; a shorter branch repeats a place behind its end.
        own: [K * C] True where `places` holds a token, not a repetition.
        seen: [C, P + C] True where a branch's token attends to one of the prefix or of its branch.
    """

    start: int
    stop: int
    places: Tensor
    own: Tensor
    seen: Tensor


@dataclass(frozen=True)
class _Packed:
    """A micro-batch in one row.

    Attributes:
        ids, positions: [1, L].
        trees: in the order of the row.
        places: [B, T - 1] of each token that the model reads; 0 in the padding.
    """

    ids: Tensor
    positions: Tensor
    trees: tuple[_Tree, ...]
    places: Tensor


def hidden_states(decoder: Any, batch: Experience) -> Tensor:
    """[B, T - 1, d] last hidden states of a micro-batch, whose last tokens are not read; arbitrary in the padding.

    Call it, and the backward pass of its result, inside `attention_to_prefixes`.
    """
    packed = _pack(batch)
    states = decoder(
        input_ids=packed.ids, position_ids=packed.positions, use_cache=False, trees=packed.trees
    ).last_hidden_state
    result: Tensor = states[0].index_select(0, packed.places.flatten()).unflatten(0, packed.places.shape)
    return result


@contextmanager
def attention_to_prefixes(decoder: Any) -> Iterator[None]:
    """Let the decoder attend by trees inside this block.

    The backward pass belongs inside, because gradient checkpointing runs the layers again there.
    """
    from tasks.pretrained import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    config = decoder.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.no_grad()
def require_supported(decoder: Any) -> None:
    """Read a small tree and its samples one by one.

    Raises:
        ValueError: an architecture whose hidden states would be wrong here.
    """
    size = decoder.config.vocab_size
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]], device=decoder.device) % size
    mask = torch.arange(6, device=decoder.device).expand(2, 6) >= 3
    batch = Experience(ids, torch.tensor([6, 6]), mask, mask, torch.zeros(2, 6), ("0", "0"), torch.zeros(2, 6))
    expected = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    with attention_to_prefixes(decoder):
        found = hidden_states(decoder, batch)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(decoder).__name__}: its hidden states change when samples share a prefix, because its attention is "
            "not only causal or takes no arguments. Set train: share_prefixes: false."
        )


def _pack(batch: Experience) -> _Packed:
    """Lay the prefixes and branches of a micro-batch into one row; a prefix stands before its branches."""
    prefixes, read = batch.prefix_lengths.tolist(), [length - 1 for length in batch.lengths.tolist()]
    places = torch.zeros(len(batch), batch.ids.shape[1] - 1, dtype=torch.long)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    trees: list[_Tree] = []
    size = 0

    for rows in prefix_groups(batch):
        start, prefix = size, prefixes[rows[0]]
        ids.append(batch.ids[rows[0], :prefix])
        positions.append(torch.arange(prefix))
        size += prefix

        begins = []
        for row in rows:
            begins.append(size)
            ids.append(batch.ids[row, prefix : read[row]])
            positions.append(torch.arange(prefix, read[row]))
            places[row, :prefix] = torch.arange(start, start + prefix)
            places[row, prefix : read[row]] = size + torch.arange(read[row] - prefix)
            size += read[row] - prefix
        trees.append(_tree(start, start + prefix, begins, size, batch.ids.device))

    device = batch.ids.device
    return _Packed(torch.cat(ids)[None], torch.cat(positions)[None].to(device), tuple(trees), places.to(device))


def _tree(start: int, stop: int, begins: Sequence[int], end: int, device: torch.device) -> _Tree:
    """The tree whose branches begin at these places, one behind the other, and end at `end`."""
    begin = torch.tensor(begins)[:, None]
    length = torch.tensor([*begins[1:], end])[:, None] - begin
    offset = torch.arange(int(length.max()))[None]
    own = offset < length
    prefix = torch.ones(offset.shape[1], stop - start, dtype=torch.bool)
    seen = torch.cat([prefix, offset <= offset.T], 1)
    # A repeated place is behind the branch's end, where none of its own tokens sees it.
    return _Tree(start, stop, torch.where(own, begin + offset, 0).to(device), own.flatten().to(device), seen.to(device))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trees: Sequence[_Tree] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, [1, heads, L, head_dim] -> [1, L, heads, head_dim], as transformers calls it."""
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)

    pieces = []
    for tree in trees:
        q, k, v = (states[:, :, tree.start : tree.stop] for states in (query, key, value))
        pieces.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
        if tree.places.numel():
            branches = scaled_dot_product_attention(
                _of_branches(query, tree),
                _after_prefix(key, tree),
                _after_prefix(value, tree),
                attn_mask=tree.seen,
                scale=scaling,
            )
            pieces.append(branches.flatten(1, 2)[None, :, tree.own])
    return torch.cat(pieces, 2).transpose(1, 2).contiguous(), None


def _after_prefix(states: Tensor, tree: _Tree) -> Tensor:
    """[heads, K, P + C, head_dim]: for each branch the prefix's states, then its own."""
    own = _of_branches(states, tree)
    prefix = states[0][:, None, tree.start : tree.stop].expand(-1, own.shape[1], -1, -1)
    return torch.cat([prefix, own], 2)


def _of_branches(states: Tensor, tree: _Tree) -> Tensor:
    """[heads, K, C, head_dim], from [1, heads, L, head_dim]."""
    # Its backward pass is much faster on a CPU than that of indexing with a table.
    result: Tensor = states[0].index_select(1, tree.places.flatten()).unflatten(1, tree.places.shape)
    return result
