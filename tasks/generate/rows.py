"""A plain generator whose rows know nothing of one another: what a row writes follows from its own text and draws.

So it does not matter which rows are played together, in which order, or by how many generators: tokens and logprobs
are the same bits. Rows may therefore go on as soon as their own search has returned (`submit`, `advance`), and a fleet
of generators may divide them.

All rows that are to read something are packed into one row of tokens, whatever their number is: several for an
observation, one for a draw. Libraries choose the kernel of a matrix product by its number of tokens, and kernels round
their sums otherwise, each processor in its own way. So products with weights are made of `BLOCK` tokens each, the last
block filled up, on one thread (several would divide a product): one kernel, which gives a token the same bits at each
place of a block. Attention is computed for each row alone, on its own keys and values. A draw is a function of (seed,
number of the row among those of its draw, position). A fleet of generators uses more processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.attention import attending, causal_mask_after, grouped_attention
from tasks.generate import Call, Revived, Sampling, Trainee, not_open, require_prompts
from tasks.generate.plain import PlainConf, PlainGenerator, completes_stop, draw_tokens
from tasks.model import Dtype

BLOCK = 16
"""Tokens of a matrix product. The kernels of float32 for AVX2 round differently at the places of 8 or 32 tokens."""
_NAME = "of_rows"
"""Of this attention among those of transformers."""
_GROW = 64


class _Memory:
    """Keys and values of one row: [2, groups, positions, head_dim] for each layer, with room for some more."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}
        self.length = 0

    def copy(self) -> _Memory:
        """A row of the same text."""
        made = _Memory()
        made.layers = {layer: buffer.clone() for layer, buffer in self.layers.items()}
        made.length = self.length
        return made

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of newly read tokens, [groups, c, head_dim]; returns those of the whole text."""
        length = self.length + keys.shape[1]
        buffer = self.layers.get(layer)
        if buffer is None or buffer.shape[2] < length:
            wide = -(-max(length, 0 if buffer is None else buffer.shape[2] * 3 // 2) // _GROW) * _GROW
            grown = keys.new_zeros(2, keys.shape[0], wide, keys.shape[2])
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = self.layers[layer] = grown
        buffer[0, :, self.length : length] = keys
        buffer[1, :, self.length : length] = values
        return buffer[0, :, :length], buffer[1, :, :length]


@dataclass
class _Row:
    """A row of a session.

    Attributes:
        memory: of the tokens that were read.
        pending: tokens still to be read; the newest one is read with the next draw.
        uniforms: its random numbers, one per position.
        recent: what it wrote since its last observation, in which stop strings are looked for.
        budget: tokens that its call may still write; 0 where it has no call.
        ids, logprobs: what the call wrote.
    """

    memory: _Memory
    pending: list[int]
    uniforms: np.ndarray
    recent: list[int] = field(default_factory=list)
    budget: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Tokens of its text."""
        return self.memory.length + len(self.pending)


class RowsGenerator(PlainGenerator):
    """See the module; models and weights as those of the plain generator."""

    rows_are_free = True

    def open(  # type: ignore[override]
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> RowsSession:
        """See `Generator.open`."""
        return RowsSession(self, prompts, copies, sampling, max_total_tokens)


class RowsSession:
    """See `Session`."""

    def __init__(
        self,
        owner: RowsGenerator,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        self.owner, self.sampling, self.max_total_tokens = owner, sampling, max_total_tokens
        self.num_prefilled = self.num_generated = 0
        self._rows: dict[int, _Row] = {}  # Open ones by number.
        self._count = 0
        self.extend(prompts, copies)

    def extend(self, prompts: Sequence[Sequence[int]], copies: int, numbers: Sequence[int] | None = None) -> list[int]:
        """See `FreeSession.extend`; a fleet gives the numbers, since other sessions have those between them."""
        require_prompts(prompts, self.max_total_tokens)
        self.num_prefilled += sum(len(prompt) - 1 for prompt in prompts) + len(prompts) * copies
        heads = [_Row(_Memory(), list(prompt[:-1]), np.empty(0)) for prompt in prompts]
        with torch.inference_mode(), _in_blocks(self.owner.model):
            self._read([head for head in heads if head.pending])
        new = iter(range(self._count, self._count + len(prompts) * copies) if numbers is None else numbers)
        return [
            self._add(next(new), head.memory if copy == copies - 1 else head.memory.copy(), [prompt[-1]])
            for head, prompt in zip(heads, prompts, strict=True)
            for copy in range(copies)
        ]

    @torch.inference_mode()
    def revive(self, rows: Sequence[Revived]) -> None:
        """See `Revived`. Attention of one position and of several differ in bits, so pieces are read as they were."""
        for row in rows:
            self._add(row.number, _Memory(), [])
            self._rows[row.number].recent = list(row.recent)
        for step in range(max(len(row.read) for row in rows)):
            reading = [row for row in rows if step < len(row.read)]
            for row in reading:
                self._rows[row.number].pending = list(row.read[step])
            with _in_blocks(self.owner.model):
                self._read([self._rows[row.number] for row in reading])
        for row in rows:
            self._rows[row.number].pending = list(row.pending)

    def _add(self, number: int, memory: _Memory, pending: Sequence[int]) -> int:
        self._count = max(self._count, number + 1)
        seeds = [self.sampling.seed % 2**64, self.sampling.first_row + number]
        uniforms = np.random.Generator(np.random.Philox(key=np.array(seeds, np.uint64))).random(
            self.max_total_tokens + 1
        )
        self._rows[number] = _Row(memory, list(pending), uniforms)
        return number

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`."""
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)}: expected different rows.")
        for row, budget in zip(rows, max_new_tokens, strict=True):
            self._require_playable(row, budget)
        for row, budget in zip(rows, max_new_tokens, strict=True):
            self.submit(row, budget)
        calls: dict[int, Call] = {}
        while len(calls) < len(rows):
            calls |= dict(self.advance())
        return [calls[row] for row in rows]

    def submit(self, row: int, max_new_tokens: int) -> None:
        """See `FreeSession.submit`."""
        self._require_playable(row, max_new_tokens)
        playing = self._rows[row]
        playing.budget = min(max_new_tokens, self.max_total_tokens - playing.total)
        playing.ids, playing.logprobs = [], []

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Call]]:
        """See `FreeSession.advance`."""
        playing = [(number, row) for number, row in self._rows.items() if row.budget]
        if not playing:
            return []
        rows = [row for _, row in playing]
        with _in_blocks(self.owner.model):
            states = self._read(rows)
            logits = self.owner.model.get_output_embeddings()(states)
        self.num_generated += len(rows)
        uniforms = np.array([row.uniforms[row.memory.length] for row in rows])
        tokens, logprobs = draw_tokens(logits.float(), self.sampling, uniforms)
        ended = [self._write(row, token, logprob) for row, token, logprob in zip(rows, tokens, logprobs, strict=True)]
        return [(number, call) for (number, _), call in zip(playing, ended, strict=True) if call is not None]

    def _write(self, row: _Row, token: int, logprob: float) -> Call | None:
        """Record a drawn token; the call if it is over."""
        if token in self.owner.eos_ids:
            row.budget = 0
            return Call(tuple(row.ids), tuple(row.logprobs), False)
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.recent.append(token)
        row.pending = [token]
        row.budget -= 1
        stopped = completes_stop(self.owner.tokenizer, self.sampling.stop, row.recent)
        if not stopped and row.budget:
            return None
        row.budget = 0
        return Call(tuple(row.ids), tuple(row.logprobs), stopped)

    def _read(self, rows: Sequence[_Row]) -> Tensor:
        """Read the pending tokens of these rows in one pass; returns the state after the last of each, [n, d]."""
        model = self.owner.model
        if not rows:
            return torch.empty(0, device=model.device)
        sizes = [len(row.pending) for row in rows]
        starts = [row.memory.length for row in rows]
        ids = [token for row in rows for token in row.pending]
        positions = [start + i for start, size in zip(starts, sizes, strict=True) for i in range(size)]
        with attending(model.get_decoder(), _NAME, _attend):
            states: Tensor = model.get_decoder()(
                input_ids=torch.tensor([ids], device=model.device),
                position_ids=torch.tensor([positions], device=model.device),
                use_cache=False,
                memories=[row.memory for row in rows],
                sizes=sizes,
            ).last_hidden_state[0]  # [L, d]

        for row, size in zip(rows, sizes, strict=True):
            row.memory.length += size
            row.pending = []
        ends = np.cumsum(sizes) - 1
        return states[torch.from_numpy(ends).to(states.device)]

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`."""
        for row, ids in zip(rows, token_ids, strict=True):
            room = self.max_total_tokens - self._open(row).total
            if len(ids) > room:
                raise ValueError(
                    f"row {row}: {len(ids)} tokens more than max_total_tokens={self.max_total_tokens} allows."
                )
        for row, ids in zip(rows, token_ids, strict=True):
            self._rows[row].pending.extend(ids)
            self._rows[row].recent = []
            self.num_prefilled += len(ids)

    @torch.inference_mode()
    def fork(self, row: int, times: int, numbers: Sequence[int] | None = None) -> list[int]:
        """See `Session.fork`; `numbers` as in `extend`."""
        parent = self._open(row)
        if times < 1:
            raise ValueError(f"row {row}: found times={times}, expected at least 1 new row.")
        newest = parent.pending[-1:]
        if len(parent.pending) > 1:
            del parent.pending[-1:]
            with _in_blocks(self.owner.model):
                self._read([parent])
            parent.pending = list(newest)
        self.num_prefilled += times * len(newest)
        new_rows = range(self._count, self._count + times) if numbers is None else numbers
        for number in new_rows:
            self._add(number, parent.memory.copy(), newest)
            self._rows[number].recent = list(parent.recent)
        return list(new_rows)

    def close(self, rows: Sequence[int]) -> None:
        """See `Session.close`."""
        for row in rows:
            assert 0 <= row < self._count, row
            self._rows.pop(row, None)

    def _open(self, row: int) -> _Row:
        if row not in self._rows:
            raise ValueError(not_open(row, self._count, len(self._rows)))
        return self._rows[row]

    def _require_playable(self, row: int, most: int) -> None:
        playing = self._open(row)
        room = self.max_total_tokens - playing.total
        if most < 1 or room < 1 or not playing.pending or playing.budget:
            raise ValueError(
                f"row {row}: budget {most}, room for {room} tokens below max_total_tokens={self.max_total_tokens}, "
                f"{len(playing.pending)} tokens to read; expected at least 1 of each, and no call that is not over."
            )


@contextmanager
def _in_blocks(model: nn.Module) -> Iterator[None]:
    """Inside it, the linear layers of a model multiply `BLOCK` tokens at a time, on one thread."""
    threads = torch.get_num_threads()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if threads > 1:
        torch.set_num_threads(1)
    for layer in layers:
        layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        if threads > 1:
            torch.set_num_threads(threads)


def _multiply(layer: nn.Linear, states: Tensor) -> Tensor:
    """As the layer's `forward`, [..., d] -> [..., n]."""
    tokens = states.reshape(-1, states.shape[-1])
    filled = nn.functional.pad(tokens, (0, 0, 0, -len(tokens) % BLOCK))
    blocks = [nn.functional.linear(block, layer.weight, layer.bias) for block in filled.split(BLOCK)]
    return torch.cat(blocks)[: len(tokens)].reshape(*states.shape[:-1], -1)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    memories: Sequence[_Memory] = (),
    sizes: Sequence[int] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the packed rows, [1, heads, L, head_dim] -> [1, L, heads, head_dim], each on its own text."""
    attended = torch.zeros_like(query)
    start = 0
    for memory, size in zip(memories, sizes, strict=True):
        stop = start + size
        keys, values = memory.add(module.layer_idx, key[0, :, start:stop], value[0, :, start:stop])
        seen = causal_mask_after(memory.length, size, query.device) if size > 1 else None
        attended[:, :, start:stop] = grouped_attention(query[:, :, start:stop], keys[None], values[None], seen, scaling)
        start = stop
    return attended.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class RowsConf(PlainConf):
    """It has no settings."""

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> RowsGenerator:
        """See `GeneratorConf.start`."""
        plain = super().start(folder, dtype, trainee)
        return RowsGenerator(plain.model, plain.tokenizer, plain.shares_weights, plain.folder)


PART = RowsConf
