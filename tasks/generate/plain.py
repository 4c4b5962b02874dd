"""The obvious generator: a transformers model, one process, its own decode loop.

Each prompt is read once, and its key-value cache is copied to all its rows. The cache is kept across turns, so that an
observation costs only its own length, and a finished row leaves the batch at once. Rows live in one buffer,
right-padded, active rows first: a row that stops is swapped behind the last active one, so that every forward pass
reads a view and copies nothing. A draw is a function of (seed, row, position) and does not depend on which other rows
are still active.

With `share_reading`, prompts read their common beginning once, and rows whose texts are equal up to an observation read
it as one row, whose keys and values the others get.

It refuses attention that would not use its mask (sliding windows, implementations other than sdpa). Its logits are
`output_embeddings(decoder(...))`: `tasks.model` loads no model whose logits are others (scaled, or with soft caps).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tasks.attention import GROUPED, attend_grouped, attending
from tasks.generate import Adapters, Call, Sampling, Trainee, Weights, checked, not_open, require_prompts
from tasks.generate.adapters import merged, shapes_of
from tasks.generate.handover import stored_shapes
from tasks.model import Dtype, computes_in, load_policy, load_tokenizer, pick_device
from tasks.shared_prefix import common_beginning

if TYPE_CHECKING:
    from tasks.generate.row_cache import RowCache

_STOP_TOKENS = 32  # More than the bytes of any stop string, so that it fits however it is split into tokens.


class PlainGenerator:
    """Generates with a transformers model, which may be the one under training.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: its tokenizer.
        shares_weights: the trainer updates this very module, so `update_weights` has nothing to do.
        folder: of the start policy, to which adapters are added; None takes no adapters.

    Raises:
        ValueError: attention that would not use its mask.
    """

    plays_apart = False
    tolerance = 1e-3  # Of a logprob of a copy from the policy's, in float32 and on a CPU.

    def __init__(self, model: Any, tokenizer: Any, shares_weights: bool = False, folder: Path | None = None) -> None:
        _require_attention(model.config)
        self.model = model
        self.tokenizer = tokenizer
        self.shares_weights = shares_weights
        self.folder = folder
        self.eos_ids = end_ids(model, tokenizer)

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]`, each given all tokens before it."""
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        table = self.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logprobs: list[float] = table.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return logprobs

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> PlainSession:
        """See `Generator.open`."""
        return PlainSession(self, prompts, copies, sampling, max_total_tokens)

    def attending(self) -> AbstractContextManager[None]:
        """The block of a forward pass."""
        config = self.model.config
        heads = config.num_attention_heads
        is_grouped = (getattr(config, "num_key_value_heads", None) or heads) < heads
        return attending(self.model.get_decoder(), GROUPED, attend_grouped) if is_grouped else nullcontext()

    def update_weights(self, weights: Weights | Adapters) -> None:
        """See `Generator.update_weights`."""
        if self.shares_weights:
            return
        if isinstance(weights, Adapters):
            assert self.folder is not None, "adapters without the start policy to which they belong"
            expected = shapes_of(weights, stored_shapes(self.folder))
            factors = {name: tensor.cpu().clone() for name, tensor in checked(weights.factors, expected)}
            weights = merged(self.folder, factors, weights.scale)
        parameters = dict(self.model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        # Check all weights before the first one is changed. Clone them, because the source may reuse its memory.
        new_weights = {name: tensor.clone() for name, tensor in checked(weights, shapes)}
        with torch.no_grad():
            for name, tensor in new_weights.items():
                parameters[name].copy_(tensor)

    def sleep(self) -> None:
        """Does nothing: a shared model belongs to the trainer, and a copy of its own stays in memory."""

    def wake(self) -> None:
        """Does nothing, because `sleep` frees nothing."""

    def shutdown(self) -> None:
        """Does nothing: there is no process to stop."""


@dataclass(frozen=True)
class PlainConf:
    """The plain generator has no settings."""

    def check_model(self, config: Any) -> None:
        """See `Particular.check_model`."""
        _require_attention(config)

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> PlainGenerator:
        """See `GeneratorConf.start`."""
        if trainee is not None and trainee.causal_lm is not None:
            return PlainGenerator(trainee.causal_lm, load_tokenizer(folder), shares_weights=True)
        device = pick_device()
        model, tokenizer = load_policy(folder, computes_in(dtype, device))
        return PlainGenerator(model.to(device), tokenizer, folder=folder)


PART = PlainConf


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a call: the tokenizer's end of text and those of the generation settings."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return frozenset(i for i in ids if i is not None)


def _require_attention(config: Any) -> None:
    """Raise the ValueError for attention that would not use the plain generator's mask.

    Args:
        config: of the model, as transformers reads it.
    """
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


@dataclass
class _Writing:
    """What a row has written in its current call; `budget` is the most tokens it may write."""

    budget: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    def call(self) -> Call:
        return Call(tuple(self.ids), tuple(self.logprobs), self.stopped)


class _Texts:
    """Numbers of the rows' texts, so that equal numbers are equal tokens; all 0 where rows do not share what they read.

    Attributes:
        of: by row, the number of what it has in the cache.
    """

    def __init__(self, num_rows: int, is_shared: bool) -> None:
        self.of = [0] * num_rows
        self._is_shared = is_shared
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # of a text and what follows it -> of both

    def read(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        """The rows have these tokens in the cache, too."""
        if self._is_shared:
            for row, chunk in zip(rows, chunks, strict=True):
                self.of[row] = self._with(row, chunk)

    def _with(self, row: int, chunk: Sequence[int]) -> int:
        return self._numbers.setdefault((self.of[row], tuple(chunk)), len(self._numbers) + 1)

    def leaders(self, rows: Sequence[int], pending: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The rows, the first of every text before all others, and for each of them the place of its text's first.

        No places where each row reads for itself: its text is its own, or all read one token, which costs the same.
        """
        if not self._is_shared or all(len(pending[row]) < 2 for row in rows):
            return list(rows), []
        texts = {row: self._with(row, pending[row]) for row in rows}
        first: dict[int, int] = {}
        leading = [row for row in rows if first.setdefault(texts[row], row) == row]
        if len(leading) == len(rows):
            return list(rows), []
        order = leading + [row for row in rows if first[texts[row]] != row]
        places = {texts[row]: place for place, row in enumerate(leading)}
        return order, [places[texts[row]] for row in order]


class PlainSession:
    """See `Session`. A slot is a place in the cache, and `slot[row]` is the current place of a row.

    A row's newest token is never in the cache, because the row reads it with its next draw. So the rows of a prompt and
    the forks of a row share everything except that one token.
    """

    def __init__(
        self,
        owner: PlainGenerator,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        require_prompts(prompts, max_total_tokens)
        self.model, self.tokenizer, self.eos_ids = owner.model, owner.tokenizer, owner.eos_ids
        self.sampling, self.max_total_tokens = sampling, max_total_tokens
        self.attending = owner.attending
        self.num_prefilled = self.num_generated = 0

        rows = len(prompts) * copies
        self.row_of = list(range(rows))  # by slot
        self.slot = list(range(rows))  # by row
        self.length = np.zeros(rows, dtype=np.int64)  # by slot, tokens in the cache
        self.pending: list[list[int]] = [[p[-1]] for p in prompts for _ in range(copies)]  # by row, tokens to read
        self.written: list[list[int]] = [[] for _ in range(rows)]  # by row, since its last observation
        self._texts = _Texts(rows, sampling.share_reading)
        self.closed: set[int] = set()
        self._free: list[int] = []  # Closed rows whose slot can be given to a new row.
        self.cache = _empty_cache(self.model, self.max_total_tokens)

        self._random = torch.Generator().manual_seed(sampling.seed)
        self.uniforms = self._draw_uniforms(rows)  # [rows, positions]
        self._prefill(prompts, copies)

    def _draw_uniforms(self, rows: int) -> np.ndarray:
        """Random numbers for the next rows, one per position.

        torch fills a table on the CPU row by row from one stream, so a later row gets its numbers of a larger table.
        """
        table: np.ndarray = torch.rand(rows, self.max_total_tokens + 1, generator=self._random).numpy()
        return table

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        heads = [list(p[:-1]) for p in prompts]
        common = _readable_once(heads) if self.sampling.share_reading else 0
        self.num_prefilled += sum(map(len, heads)) - common * (len(heads) - 1) + len(self.pending)
        self._texts.read(range(len(self.pending)), [head for head in heads for _ in range(copies)])
        lengths = np.array([len(h) for h in heads])
        if common:
            self._forward([heads[0][:common]], np.zeros(1, dtype=np.int64))
            self.cache.copy_slot(0, [*range(1, len(heads))], common)
        if lengths.size and lengths.max() > 0:
            self._forward([head[common:] for head in heads], np.full(len(heads), common))
            self.cache.repeat(copies)
        self.cache.slots = len(self.pending)
        self.length = np.repeat(lengths, copies)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`.

        Raises:
            ValueError: a closed row, or one that would exceed `max_total_tokens`; nothing is added to any row.
        """
        self._require_open(rows)
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
        """See `Session.close`; a fork may take the slot of a closed row."""
        for row in rows:
            assert 0 <= row < len(self.slot), row
            if row not in self.closed:
                self.closed.add(row)
                self._free.append(row)
        if len(self.closed) == len(self.slot):
            # No row can read the old cache any more, so its memory is freed.
            self.cache = _empty_cache(self.model, self.max_total_tokens)

    @torch.inference_mode()
    def fork(self, row: int, times: int) -> list[int]:
        """See `Session.fork`; keys and values are copied.

        Raises:
            ValueError: a closed row, or `times` below 1.
        """
        self._require_open([row])
        if times < 1:
            raise ValueError(f"row {row}: found times={times}, expected at least 1 new row.")
        self._read_ahead(row)

        new_rows = list(range(len(self.slot), len(self.slot) + times))
        for new in new_rows:
            self._give_slot(new)
            self.pending.append(list(self.pending[row]))
            self._texts.of.append(self._texts.of[row])
            self.written.append(list(self.written[row]))
        slots = [self.slot[new] for new in new_rows]
        self.length[slots] = length = int(self.length[self.slot[row]])
        self.cache.copy_slot(self.slot[row], slots, length)

        self.uniforms = np.concatenate([self.uniforms, self._draw_uniforms(times)])
        self.num_prefilled += times * len(self.pending[row])
        return new_rows

    def _read_ahead(self, row: int) -> None:
        """Read all but the newest token of a row, so that its forks need not; also of the rows that are forked next."""
        if len(self.pending[row]) < 2:
            return
        unread = [one for one, tokens in enumerate(self.pending) if len(tokens) > 1 and one not in self.closed]
        for place, one in enumerate(unread):
            self._swap(place, self.slot[one])
        chunks = [self.pending[one][:-1] for one in unread]
        self._forward(chunks, self.length[: len(unread)])
        self.length[: len(unread)] += [len(chunk) for chunk in chunks]
        self._texts.read(unread, chunks)
        for one in unread:
            del self.pending[one][:-1]

    def _give_slot(self, row: int) -> None:
        """Give a new row the slot of a closed row, or else an additional one."""
        if self._free:
            slot = self.slot[self._free.pop()]
            self.row_of[slot] = row
        else:
            slot = len(self.row_of)
            self.row_of.append(row)
            self.length = np.append(self.length, 0)
        self.slot.append(slot)

    @torch.inference_mode()
    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`.

        Raises:
            ValueError: a closed or repeated row, a budget below 1, a full row, or one that ended, without observation.
        """
        self._require_playable(rows, max_new_tokens)
        writings = {row: _Writing(min(most, self._room(row))) for row, most in zip(rows, max_new_tokens, strict=True)}
        order, leaders = self._texts.leaders(rows, self.pending)
        for place, row in enumerate(order):
            self._swap(place, self.slot[row])

        active = len(rows)
        while active:
            playing = self.row_of[:active]
            tokens, logprobs = self._next_tokens(playing, leaders)
            leaders = []
            is_over = [
                self._write(row, writings[row], token, logprob)
                for row, token, logprob in zip(playing, tokens, logprobs, strict=True)
            ]
            for row in (row for row, over in zip(playing, is_over, strict=True) if over):
                active -= 1
                self._swap(self.slot[row], active)
        return [writings[row].call() for row in rows]

    def _next_tokens(self, playing: list[int], leaders: list[int]) -> tuple[list[int], list[float]]:
        """Draw one token for each playing row, which are in the first slots; their pending tokens enter the cache."""
        active = len(playing)
        chunks = [self.pending[row] for row in playing]
        self._texts.read(playing, chunks)
        hidden = self._read_once(chunks, leaders) if leaders else self._forward(chunks, self.length[:active])
        self.length[:active] += [len(c) for c in chunks]
        self.num_generated += active
        return self._sample(self.model.get_output_embeddings()(hidden).float(), playing)

    def _read_once(self, chunks: list[list[int]], leaders: list[int]) -> Tensor:
        """Read the chunks of the leading slots, and give the others the keys, values and states of their leader."""
        num_leading = max(leaders) + 1
        hidden = self._forward(chunks[:num_leading], self.length[:num_leading])
        for slot, leader in enumerate(leaders[num_leading:], num_leading):
            self.cache.copy_slot(leader, [slot], int(self.length[leader]) + len(chunks[leader]))
            self.num_prefilled -= len(chunks[leader]) - 1  # All but the token that the row wrote itself.
        return hidden[torch.tensor(leaders, device=hidden.device)]

    def _write(self, row: int, writing: _Writing, token: int, logprob: float) -> bool:
        """Record one drawn token; returns whether the row's call is over."""
        if token in self.eos_ids:
            self.pending[row] = []
            return True
        writing.ids.append(token)
        writing.logprobs.append(logprob)
        self.pending[row] = [token]
        self.written[row].append(token)
        writing.stopped = completes_stop(self.tokenizer, self.sampling.stop, self.written[row])
        return writing.stopped or len(writing.ids) >= writing.budget

    def _require_playable(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> None:
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)}: expected different rows.")
        self._require_open(rows)
        for row, most in zip(rows, max_new_tokens, strict=True):
            if most < 1 or self._room(row) < 1 or not self.pending[row]:
                raise ValueError(
                    f"row {row}: budget {most}, room for {self._room(row)} tokens below max_total_tokens="
                    f"{self.max_total_tokens}, {len(self.pending[row])} tokens to read; expected at least 1 of each."
                )

    def _require_open(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self.closed or not 0 <= row < len(self.slot):
                raise ValueError(not_open(row, len(self.slot), len(self.slot) - len(self.closed)))

    def _room(self, row: int) -> int:
        return self.max_total_tokens - int(self.length[self.slot[row]]) - len(self.pending[row])

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.cache.swap(a, b, int(max(self.length[a], self.length[b])))
        self.length[[a, b]] = self.length[[b, a]]
        self.row_of[a], self.row_of[b] = self.row_of[b], self.row_of[a]
        self.slot[self.row_of[a]], self.slot[self.row_of[b]] = a, b

    def _forward(self, chunks: list[list[int]], starts: np.ndarray) -> Tensor:
        """Read ragged chunks [n][<=c] into slots 0..n-1 from positions `starts`; returns the last states [n, d]."""
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

        with self.attending():
            out: Tensor = self.model.get_decoder()(
                input_ids=torch.from_numpy(filled).to(device),
                attention_mask=seen,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state  # [n, c, d]
        return out[torch.arange(len(chunks)), torch.from_numpy(sizes).to(out.device) - 1]

    def _sample(self, logits: Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        return draw_tokens(logits, self.sampling, self.uniforms[rows, self.length[: len(rows)]])


def _readable_once(heads: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with, such as their instructions.

    One token of each prompt is left, so that no row of the next forward pass is empty.
    """
    return max(0, min(common_beginning(heads), min(map(len, heads)) - 1)) if len(heads) > 1 else 0


def _empty_cache(model: Any, longest: int) -> RowCache:
    # This import takes seconds, for which a process that only reads settings should not wait.
    from tasks.generate.row_cache import RowCache

    return RowCache(model.config.num_hidden_layers, longest)


def completes_stop(tokenizer: Any, stops: Sequence[str], written: Sequence[int]) -> bool:
    """Whether the last token completes a stop string, which may begin in an earlier call of the same turn."""
    piece = tokenizer.convert_ids_to_tokens(written[-1])
    # Decoding is slow. A token that lacks the last character of every stop string cannot complete one.
    if not any(stop[-1] in piece or not stop[-1].isascii() for stop in stops):
        return False
    recent = written[-_STOP_TOKENS:]
    before = tokenizer.decode(recent[:-1], skip_special_tokens=False)
    text = tokenizer.decode(recent, skip_special_tokens=False)
    return any(text.count(stop) > before.count(stop) for stop in stops)


def draw_tokens(logits: Tensor, sampling: Sampling, uniforms: np.ndarray) -> tuple[list[int], list[float]]:
    """One token per row of logits [n, V], by one uniform number each, and its log-probability at temperature 1."""
    logprobs = logits.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probs = (logits / sampling.temperature).softmax(-1)
        if sampling.top_p < 1:
            probs = nucleus(probs, sampling.top_p)
        tokens = inverse_cdf(probs, torch.from_numpy(uniforms).to(probs.device))
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One draw per row: the first token whose cumulative probability exceeds the uniform; [n, V], [n] -> [n].

    The uniform is scaled by the row's total. Without that, rounding in the sum could select past the last token. A
    token of probability 0 is never drawn.

    >>> inverse_cdf(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([0.4]))
    tensor([1])
    """
    cumulative = probs.double().cumsum(-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Probabilities [n, V] with zeros outside the smallest set of tokens whose mass reaches top_p."""
    order = probs.sort(dim=-1, descending=True, stable=True)
    kept = order.values.cumsum(-1) - order.values < top_p
    return torch.zeros_like(probs).scatter(-1, order.indices, order.values * kept)
