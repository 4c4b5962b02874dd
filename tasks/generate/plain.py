"""The obvious generator: a transformers model, one process, its own decode loop.

Each prompt is read once and its key-value cache copied to the rows of its group; the cache is kept across
turns, so an observation costs its own length only; a finished row leaves the batch at once. Rows live in
one buffer, right-padded, active rows first: a row that stops is swapped behind the last active one, so
every forward reads a view and copies nothing. Draws are a function of (seed, row, position): which other
rows are still playing does not matter to them.

Refuses architectures whose head is not `output_embeddings(decoder(...))` (logit scaling, soft caps), and
attention it cannot give its mask to (sliding windows, implementations other than sdpa).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tasks.generate import Call, Sampling

_GROW = 64
_STOP_TOKENS = 32  # more than the bytes of any stop string, so that it fits however it was split


class PlainGenerator:
    """Generates with a model that the trainer may hold too; then new weights are there without a copy.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: its tokenizer.
        shares_weights: the trainer updates this very module, so `update_weights` has nothing to do.

    Raises:
        ValueError: an architecture that would be read wrongly here.
    """

    def __init__(self, model: Any, tokenizer: Any, shares_weights: bool = False) -> None:
        _require_supported(model)
        self.model, self.tokenizer, self.shares_weights = model, tokenizer, shares_weights
        self.eos_ids = end_ids(model, tokenizer)

    def open(
        self, prompts: Sequence[Sequence[int]], group_size: int, sampling: Sampling, max_total_tokens: int
    ) -> PlainSession:
        """See `Generator.open`."""
        return PlainSession(self, prompts, group_size, sampling, max_total_tokens)

    def update_weights(self, folder: Path) -> None:
        """See `Generator.update_weights`."""
        if not self.shares_weights:
            fresh = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
            self.model.load_state_dict(fresh.state_dict())

    def shutdown(self) -> None:
        """Nothing to stop."""


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a call: the tokenizer's end of text and those of the generation settings."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    found = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return frozenset(i for i in found if i is not None)


@torch.inference_mode()
def _require_supported(model: Any) -> None:
    config = model.config
    if config._attn_implementation != "sdpa":
        raise ValueError(
            f"attention implementation {config._attn_implementation!r}: the plain generator expects 'sdpa', others "
            f"read its mask differently. Load the model without attn_implementation, or set generator: vllm."
        )
    if getattr(config, "sliding_window", None):
        raise ValueError(
            f"sliding_window={config.sliding_window}: the plain generator attends to all tokens. "
            f"Set generator: vllm in params.yaml."
        )
    probe = torch.arange(min(4, config.vocab_size), device=model.device)[None]
    expected = model(input_ids=probe, use_cache=False).logits
    found = model.get_output_embeddings()(model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__}: its logits are not head(decoder(ids)) (scaled or capped), which generator and "
            f"trainer expect. Use a model of another architecture, such as Qwen2."
        )


class PlainSession:
    """See `Session`. Slots are positions in the cache; `slot[row]` says where a row lives now."""

    def __init__(
        self, owner: PlainGenerator, prompts: Sequence[Sequence[int]], group_size: int, sampling: Sampling,
        max_total_tokens: int,
    ) -> None:  # fmt: skip
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) < max_total_tokens:
                raise ValueError(
                    f"prompt {number}: found {len(prompt)} tokens, expected 1 to {max_total_tokens - 1}, so that at "
                    f"least one token can be written. Shorten the prompt or raise max_total_tokens."
                )
        self.model, self.tokenizer, self.eos_ids = owner.model, owner.tokenizer, owner.eos_ids
        self.sampling, self.max_total_tokens = sampling, max_total_tokens
        self.num_prefilled = self.num_generated = 0
        rows = len(prompts) * group_size
        self.row_of, self.slot = list(range(rows)), list(range(rows))
        self.length = np.zeros(rows, dtype=np.int64)  # [slots] tokens in the cache
        self.pending: list[list[int]] = [[p[-1]] for p in prompts for _ in range(group_size)]  # by row
        self.written: list[list[int]] = [[] for _ in range(rows)]  # by row, since its last observation
        self.cache = RowCache(self.model.config.num_hidden_layers)
        generator = torch.Generator().manual_seed(sampling.seed)
        self.uniforms = torch.rand(rows, max_total_tokens + 1, generator=generator).numpy()
        self._prefill(prompts, group_size)

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]], group_size: int) -> None:
        heads = [list(p[:-1]) for p in prompts]
        self.num_prefilled += sum(map(len, heads)) + len(self.pending)
        lengths = np.array([len(h) for h in heads])
        if lengths.size and lengths.max() > 0:
            self._forward(heads, np.zeros(len(heads), dtype=np.int64))
            self.cache.repeat(group_size)
        self.cache.slots = len(self.pending)
        self.length = np.repeat(lengths, group_size)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`.

        Raises:
            ValueError: a row would exceed `max_total_tokens`; nothing is added to any row.
        """
        for row, ids in zip(rows, token_ids, strict=True):
            if len(ids) > self._room(row):
                raise ValueError(
                    f"row {row}: {len(ids)} tokens more than max_total_tokens={self.max_total_tokens} allows."
                )
        for row, ids in zip(rows, token_ids, strict=True):
            self.pending[row].extend(ids)
            self.written[row] = []
            self.num_prefilled += len(ids)

    def close(self, rows: Sequence[int]) -> None:
        """See `Session.close`; the buffer is freed with the session."""

    @torch.inference_mode()
    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`.

        Raises:
            ValueError: a repeated row, a budget below 1, a full row, or one that ended its text and was given nothing.
        """
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)}: expected different rows.")
        for row, most in zip(rows, max_new_tokens, strict=True):
            if most < 1 or self._room(row) < 1 or not self.pending[row]:
                raise ValueError(
                    f"row {row}: budget {most}, room for {self._room(row)} tokens below max_total_tokens="
                    f"{self.max_total_tokens}, {len(self.pending[row])} tokens to read; expected at least 1 of each."
                )
        for place, row in enumerate(rows):
            self._swap(place, self.slot[row])
        ids: dict[int, list[int]] = {row: [] for row in rows}
        logprobs: dict[int, list[float]] = {row: [] for row in rows}
        stopped = dict.fromkeys(rows, False)
        budget = {row: min(n, self._room(row)) for row, n in zip(rows, max_new_tokens, strict=True)}
        active = len(rows)
        while active:
            playing = self.row_of[:active]
            chunks = [self.pending[row] for row in playing]
            hidden = self._forward(chunks, self.length[:active])
            self.length[:active] += [len(c) for c in chunks]
            tokens, scores = self._sample(self.model.get_output_embeddings()(hidden).float(), playing)
            self.num_generated += active
            finished = []
            for row, token, score in zip(playing, tokens, scores, strict=True):
                if token in self.eos_ids:
                    self.pending[row] = []
                    finished.append(row)
                    continue
                ids[row].append(token)
                logprobs[row].append(score)
                self.pending[row] = [token]
                self.written[row].append(token)
                stopped[row] = self._completes_stop(self.written[row])
                if stopped[row] or len(ids[row]) >= budget[row]:
                    finished.append(row)
            for row in finished:
                active -= 1
                self._swap(self.slot[row], active)
        return [Call(tuple(ids[row]), tuple(logprobs[row]), stopped[row]) for row in rows]

    def _room(self, row: int) -> int:
        return self.max_total_tokens - int(self.length[self.slot[row]]) - len(self.pending[row])

    def _completes_stop(self, written: list[int]) -> bool:
        """Whether the last token completes a stop string, which may begin in an earlier call of the same turn."""
        stops, piece = self.sampling.stop, self.tokenizer.convert_ids_to_tokens(written[-1])
        if not any(stop[-1] in piece or not stop[-1].isascii() for stop in stops):
            return False
        recent = written[-_STOP_TOKENS:]
        before = self.tokenizer.decode(recent[:-1], skip_special_tokens=False)
        text = self.tokenizer.decode(recent, skip_special_tokens=False)
        return any(text.count(stop) > before.count(stop) for stop in stops)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.cache.swap(a, b, int(max(self.length[a], self.length[b])))
        self.length[[a, b]] = self.length[[b, a]]
        self.row_of[a], self.row_of[b] = self.row_of[b], self.row_of[a]
        self.slot[self.row_of[a]], self.slot[self.row_of[b]] = a, b

    def _forward(self, chunks: list[list[int]], starts: np.ndarray) -> Tensor:
        """Read ragged chunks [n][<=c] into slots 0..n-1 from positions `starts`; each last token's state [n, d]."""
        device = self.model.device
        sizes = np.array([len(c) for c in chunks])
        width = int(sizes.max())
        filled = np.zeros((len(chunks), width), dtype=np.int64)
        for i, chunk in enumerate(chunks):
            filled[i, : len(chunk)] = chunk
        positions = torch.from_numpy(starts[:, None] + np.arange(width)).to(device)  # [n, c]
        used = int(starts.max()) + width
        self.cache.place(positions, used)
        seen = torch.arange(used, device=device) <= positions[:, None, :, None]  # [n, 1, c, used]
        out: Tensor = self.model.get_decoder()(
            input_ids=torch.from_numpy(filled).to(device),
            attention_mask=seen,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state  # [n, c, d]
        return out[torch.arange(len(chunks)), torch.from_numpy(sizes).to(out.device) - 1]

    def _sample(self, logits: Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        logprobs = logits.log_softmax(-1)  # [n, V]
        if self.sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            probs = (logits / self.sampling.temperature).softmax(-1)
            if self.sampling.top_p < 1:
                probs = _nucleus(probs, self.sampling.top_p)
            draws = self.uniforms[rows, self.length[: len(rows)]]
            tokens = inverse_cdf(probs, torch.from_numpy(draws).to(probs.device))
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        return tokens.tolist(), chosen.tolist()


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One draw per row: the first token whose cumulative probability exceeds the uniform; [n, V], [n] -> [n].

    The uniform is scaled by the row's total, so rounding in the sum can never select past the last
    token, and a token of probability 0 is never drawn.

    >>> inverse_cdf(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([0.4]))
    tensor([1])
    """
    cumulative = probs.double().cumsum(-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of tokens whose mass reaches top_p; [n, V]."""
    order = probs.sort(dim=-1, descending=True, stable=True)
    kept = order.values.cumsum(-1) - order.values < top_p
    return torch.zeros_like(probs).scatter(-1, order.indices, order.values * kept)


class RowCache(Cache):
    """Keys and values [slots, heads, positions, head_dim] per layer; each slot fills from position 0."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.used = self.slots = 0
        self.index: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def place(self, positions: Tensor, used: int) -> None:
        """The next forward writes at these positions [n, c] of slots 0..n-1 and reads positions below `used`."""
        slots = torch.arange(len(positions), device=positions.device)[:, None]
        self.index, self.used = (slots, positions), used

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [n, heads, c, d] at the placed positions; views of everything read so far."""
        slots, positions = self.index
        views = []
        for buffers, states in ((self.keys, key_states), (self.values, value_states)):
            buffer = buffers[layer_idx] = self._room(buffers[layer_idx], states)
            buffer[slots, :, positions] = states.transpose(1, 2)
            views.append(buffer[: len(positions), :, : self.used])
        return views[0], views[1]

    def _room(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        slots = max(self.slots, len(states))
        width = -(-self.used // _GROW) * _GROW
        if buffer is not None and buffer.shape[2] >= self.used and len(buffer) >= slots:
            return buffer
        grown = states.new_zeros(slots, states.shape[1], width, states.shape[3])
        if buffer is not None:
            grown[: len(buffer), :, : buffer.shape[2]] = buffer
        return grown

    def repeat(self, times: int) -> None:
        """Slot s becomes slots s * times ... s * times + times - 1."""
        for buffers in (self.keys, self.values):
            buffers[:] = [b.repeat_interleave(times, 0) if b is not None else None for b in buffers]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots, of which the first `length` positions matter."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None and max(a, b) < len(buffer):
                kept = buffer[a, :, :length].clone()
                buffer[a, :, :length] = buffer[b, :, :length]
                buffer[b, :, :length] = kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions read by the coming forward (transformers asks; masks and positions are ours)."""
        return self.used
