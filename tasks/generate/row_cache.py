"""Keys and values of the plain generator's rows, in one buffer per layer with one slot per row.

A slot fills from position 0 and is right-padded, so slots of different lengths lie side by side and the first n of
them are a view. This module knows neither rows nor tokens; `plain.py` decides which row is in which slot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.pretrained import Cache

_GROW = 64


class RowCache(Cache):
    """Keys and values [2, slots, heads, positions, head_dim] per layer; each slot fills from position 0.

    Args:
        num_layers: of the model.
        longest: most positions that a row may reach.
    """

    def __init__(self, num_layers: int, longest: int) -> None:
        super().__init__(layers=[])
        self.longest = longest
        self.buffers: list[Tensor | None] = [None] * num_layers
        self.used = self.slots = 0
        self.index: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def place(self, positions: Tensor, used: int) -> None:
        """The next forward writes at these positions [n, c] of slots 0..n-1 and reads positions below `used`."""
        slots = torch.arange(len(positions), device=positions.device)[:, None]
        self.index, self.used = (slots, positions), used

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [n, heads, c, d] at the placed positions; returns views of everything read so far."""
        slots, positions = self.index
        buffer = self.buffers[layer_idx] = self._room(self.buffers[layer_idx], key_states)
        keys, values = buffer
        keys[slots, :, positions] = key_states.transpose(1, 2)
        values[slots, :, positions] = value_states.transpose(1, 2)
        return keys[: len(positions), :, : self.used], values[: len(positions), :, : self.used]

    def _room(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        """The buffer, enlarged if it lacks slots or positions; it never shrinks."""
        old_slots, old_width = (0, 0) if buffer is None else (buffer.shape[1], buffer.shape[3])
        slots, width = max(self.slots, len(states)), self.used
        if buffer is not None and old_slots >= slots and old_width >= width:
            return buffer
        rounded = -(-width // _GROW) * _GROW
        # Grow by at least half, up to the longest row, because each growth copies the whole buffer.
        wide = max(rounded, min(old_width * 3 // 2, self.longest), old_width) if width > old_width else old_width
        grown = states.new_zeros(2, max(slots, old_slots), states.shape[1], wide, states.shape[3])
        if buffer is not None:
            grown[:, :old_slots, :, :old_width] = buffer
        return grown

    def repeat(self, times: int) -> None:
        """Slot s becomes slots s * times ... s * times + times - 1."""
        self.buffers = [b.repeat_interleave(times, 1) if b is not None else None for b in self.buffers]

    def copy_slot(self, source: int, targets: list[int], length: int) -> None:
        """Give the target slots the first `length` positions of `source`; slots beyond the buffer are added."""
        self.slots = max(self.slots, *(target + 1 for target in targets))
        for layer, buffer in enumerate(self.buffers):
            if buffer is None:
                continue  # Nothing was read yet, so there is nothing to copy.
            if buffer.shape[1] < self.slots:
                # Grow by at least half: a sampler forks row after row, and each growth copies the whole buffer.
                more = max(self.slots - buffer.shape[1], buffer.shape[1] // 2)
                buffer = torch.cat([buffer, buffer.new_zeros(2, more, *buffer.shape[2:])], 1)
                self.buffers[layer] = buffer
            kept = buffer[:, source : source + 1, :, :length].clone()  # One that fills it would overlap.
            buffer[:, targets, :, :length] = kept

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for buffer in self.buffers:
            if buffer is not None and max(a, b) < buffer.shape[1]:
                kept = buffer[:, a, :, :length].clone()
                buffer[:, a, :, :length] = buffer[:, b, :, :length]
                buffer[:, b, :, :length] = kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the next forward pass reads; transformers calls this, but our masks and positions decide."""
        return self.used
