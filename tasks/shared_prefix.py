"""Reads samples that begin alike in one row: what they share once, then what each has of its own.

The samples form a tree, and the row holds its segments. A segment attends to those above it and to itself, at the
positions that it has in its samples. So hidden states and gradients are those of separate rows, except for the order of
additions in floating point. Rollouts of a question share their prompt, and candidates for a turn all turns before it:
their prefix. A tree of every common beginning also shares what policies wrote and read in the same words, such as the
first search of a question and its passages, or the instructions of a prompt.

The decoder must pass keyword arguments on to its attention, as those of transformers do; `require_supported` tries it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tasks.attention import attending, causal_mask, grouped_attention, trains_by_matrices

Groups = Sequence[tuple[int, Sequence[int]]]
"""Rows of equal beginnings: how many tokens of them are read once, and the rows' numbers."""

_NAME = "shared_prefix"
"""Of this attention among those of transformers."""
_UNSHARED = "Set train: share_prefixes and format: share_reading to false."


@dataclass(frozen=True)
class _Segment:
    """Tokens of the packed row that the same samples share.

    Attributes:
        size: number of tokens C.
        above: numbers of the segments before it in its samples, P tokens together.
        seen: [C, P + C] True where its token attends to one of the segments above, or of itself; None below nothing.
    """

    size: int
    above: tuple[int, ...]
    seen: Tensor | None


class _Packed:
    """A batch in one row.

    Attributes:
        ids, positions: [1, L].
        segments: in the order of the row.
        places: [B, T - 1] of each token that the model reads; 0 in the padding.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, groups: Groups | None) -> None:
        self._rows = ids
        self._read = [length - 1 for length in lengths.tolist()]
        self._ids: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._size = 0
        self.segments: list[_Segment] = []
        self.places = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.long)
        if groups is None:
            self._grow(list(range(len(ids))), 0, ())
        else:
            self._by_prefix(groups)

    @property
    def ids(self) -> Tensor:
        return torch.cat(self._ids)[None]

    @property
    def positions(self) -> Tensor:
        return torch.cat(self._positions)[None].to(self._rows.device)

    def _by_prefix(self, groups: Groups) -> None:
        """Two levels: the samples' prefixes, and below each its samples."""
        for prefix, rows in groups:
            root = self._add(rows, 0, prefix, ())
            for row in rows:
                self._add([row], prefix, self._read[row], root)

    def _grow(self, rows: list[int], start: int, above: tuple[int, ...]) -> None:
        """The tree of rows whose first `start` tokens are equal and stand in the segments above."""
        ids, shortest = self._rows, min(self._read[row] for row in rows)
        differ = (ids[rows, start:shortest] != ids[rows[0], start:shortest]).any(0).nonzero()
        stop = start + int(differ[0]) if len(differ) else shortest
        above = self._add(rows, start, stop, above)
        children: dict[int, list[int]] = {}
        for row in rows:
            if self._read[row] > stop:
                children.setdefault(int(ids[row, stop]), []).append(row)
        for child in children.values():
            self._grow(child, stop, above)

    def _add(self, rows: Sequence[int], start: int, stop: int, above: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens `start` to `stop` of these rows; the segments above what follows them."""
        size = stop - start
        if size == 0:
            return above
        self.places[rows, start:stop] = self._size + torch.arange(size)
        self._ids.append(self._rows[rows[0], start:stop])
        self._positions.append(torch.arange(start, stop))
        seen = torch.ones(size, stop, dtype=torch.bool, device=self._rows.device).tril(start) if above else None
        self.segments.append(_Segment(size, above, seen))
        self._size += size
        return (*above, len(self.segments) - 1)


def common_beginning(texts: Sequence[Sequence[int]]) -> int:
    """The number of tokens with which all these texts begin.

    >>> common_beginning([[5, 6, 7], [5, 6, 8, 9]])
    2
    """
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    return sum(1 for _ in alike)


def hidden_states(decoder: Any, ids: Tensor, lengths: Tensor, groups: Groups | None = None) -> Tensor:
    """Last hidden states of samples, whose last tokens are not read.

    Call it, and the backward pass of its result, inside `attention_to_prefixes`.

    Args:
        decoder: of a causal LM of transformers.
        ids: [B, T] right-padded.
        lengths: [B] tokens of each sample.
        groups: samples that share a prefix, each sample in one of them; None shares every common beginning.

    Returns:
        [B, T - 1, d]; arbitrary in the padding.
    """
    packed = _Packed(ids, lengths, groups)
    states = decoder(
        input_ids=packed.ids, position_ids=packed.positions, use_cache=False, segments=packed.segments
    ).last_hidden_state
    places = packed.places.to(ids.device)
    result: Tensor = states[0].index_select(0, places.flatten()).unflatten(0, places.shape)
    return result


def attention_to_prefixes(decoder: Any) -> AbstractContextManager[None]:
    """Let the decoder attend by segments inside this block.

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
    expected = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    try:
        with attention_to_prefixes(decoder):
            found = hidden_states(decoder, ids, torch.tensor([6, 6]), [(3, [0, 1])])
    except (TypeError, RuntimeError) as error:  # It takes no further arguments, or does not hand them to its attention.
        raise ValueError(f"{type(decoder).__name__}: it cannot read packed samples: {error}. {_UNSHARED}") from error
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(decoder).__name__}: its hidden states change when samples share a prefix, because its attention is "
            f"not only causal or takes no arguments. {_UNSHARED}"
        )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Sequence[_Segment] = (),
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
            f"where samples share a prefix. {_UNSHARED}"
        )
    sizes = [segment.size for segment in segments]
    queries, keys, values = (piece.split(sizes, 2) for piece in (query, key, value))
    attended = []
    for number, (q, segment) in enumerate(zip(queries, segments, strict=True)):
        if segment.seen is None:
            attended.append(_causal(q, keys[number], values[number], scaling))
        else:
            k, v = (torch.cat([piece[i] for i in (*segment.above, number)], 2) for piece in (keys, values))
            attended.append(grouped_attention(q, k, v, segment.seen[None, None], scaling, trains_by_matrices(q)))
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    if trains_by_matrices(query):
        return grouped_attention(query, key, value, causal_mask(query.shape[2], query.device), scaling, True)
    is_grouped = query.shape[1] > key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)
