"""Reads samples that share a prefix in one row: the prefix once, then each sample's own tokens, its branch.

A branch attends to its prefix and to itself, at the positions that it has in its sample. So hidden states and gradients
are those of separate rows, except for the order of additions in floating point. Rollouts of a question share their
prompt; candidates for a turn share all turns before it.

The decoder must pass keyword arguments on to its attention, as those of transformers do; `require_supported` tries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tasks.attention import attending, causal_mask, grouped_attention, trains_by_matrices
from tasks.rl.experience import Experience, prefix_groups

_NAME = "shared_prefix"
"""Of this attention among those of transformers."""


@dataclass(frozen=True)
class _Tree:
    """One prefix and the branches behind it in the packed row.

    Attributes:
        prefix: its length P.
        branches: length C of each branch.
        seen: [C, P + C] for each branch, True where its token attends to a token of the prefix or of the branch.
    """

    prefix: int
    branches: tuple[int, ...]
    seen: tuple[Tensor, ...]


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


def attention_to_prefixes(decoder: Any) -> AbstractContextManager[None]:
    """Let the decoder attend by trees inside this block.

    The backward pass belongs inside, because gradient checkpointing runs the layers again there.
    """
    return attending(decoder, _NAME, _attend)


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
    device = batch.ids.device
    places = torch.zeros(len(batch), batch.ids.shape[1] - 1, dtype=torch.long)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    trees: list[_Tree] = []
    size = 0

    for rows in prefix_groups(batch):
        prefix = prefixes[rows[0]]
        places[rows, :prefix] = size + torch.arange(prefix)
        ids.append(batch.ids[rows[0], :prefix])
        positions.append(torch.arange(prefix))
        size += prefix

        for row in rows:
            own = read[row] - prefix
            places[row, prefix : read[row]] = size + torch.arange(own)
            ids.append(batch.ids[row, prefix : read[row]])
            positions.append(prefix + torch.arange(own))
            size += own
        trees.append(_tree(prefix, [read[row] - prefix for row in rows], device))
    return _Packed(torch.cat(ids)[None], torch.cat(positions)[None].to(device), tuple(trees), places.to(device))


def _tree(prefix: int, branches: Sequence[int], device: torch.device) -> _Tree:
    """The tree of these lengths."""
    longest = max(branches)
    seen = torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(prefix)
    return _Tree(prefix, tuple(branches), tuple(seen[:own, : prefix + own] for own in branches))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trees: Sequence[_Tree] = (),
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, [1, heads, L, head_dim] -> [1, L, heads, head_dim], as transformers calls it.

    Raises:
        ValueError: a window or a cap of the scores. A wide window changes nothing in the small tree of
            `require_supported`, but it does in longer rows.
    """
    if sliding_window is not None or softcap is not None:
        raise ValueError(
            f"{type(module).__name__}: found sliding_window={sliding_window}, softcap={softcap}, expected neither "
            "where samples share a prefix. Set train: share_prefixes: false."
        )
    sizes = [size for tree in trees for size in (tree.prefix, *tree.branches)]
    pieces = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    attended = []
    for tree in trees:
        q, prefix_k, prefix_v = next(pieces)
        attended.append(_causal(q, prefix_k, prefix_v, scaling))
        for seen in tree.seen:
            q, k, v = next(pieces)
            k, v = torch.cat([prefix_k, k], 2), torch.cat([prefix_v, v], 2)
            attended.append(grouped_attention(q, k, v, seen[None, None], scaling, trains_by_matrices(q)))
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    if trains_by_matrices(query):
        return grouped_attention(query, key, value, causal_mask(query.shape[2], query.device), scaling, True)
    is_grouped = query.shape[1] > key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)
