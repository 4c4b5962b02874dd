"""Tokens a second that a model writes: our sessions, transformers' `generate`, vLLM.

All sides read the same random token ids, draw at temperature 1 from the whole distribution, and write every row to
its full length: no text ends early, so all write equally many tokens. GRPO plays a prompt several times; so do these
rows. Our session and vLLM know that and read a prompt once. `generate` expands it to its rows before it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.generate import Sampling


@dataclass(frozen=True)
class Shape:
    """What each row reads and writes.

    Attributes:
        prompts, copies: different prompts, and rows of each.
        prompt: tokens of a prompt.
        turns: calls of the model; `observed` tokens are appended between two calls.
        written: tokens of a call.
    """

    prompts: int
    copies: int
    prompt: int
    turns: int
    written: int
    observed: int = 0

    @property
    def rows(self) -> int:
        """Rows that are played at once."""
        return self.prompts * self.copies

    @property
    def total(self) -> int:
        """Tokens of a row at its end."""
        return self.prompt + self.turns * self.written + (self.turns - 1) * self.observed

    @property
    def tokens(self) -> int:
        """Tokens that all rows write together."""
        return self.rows * self.turns * self.written


@dataclass(frozen=True)
class Texts:
    """Token ids of one play of a shape: its prompts, and by turn the observation of each row."""

    prompts: list[list[int]]
    observations: list[list[list[int]]]


READING, KEPT = "reading", "generate, its cache kept between turns"
Player = Callable[[Texts, Shape], float]
"""Plays a shape to its end; returns the seconds it took."""


def random_texts(shape: Shape, vocab_size: int, seed: int) -> Texts:
    """Other ids for every seed, so that no cache of an earlier play helps."""
    import numpy as np

    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, vocab_size, (shape.prompts, shape.prompt)).tolist()
    observations = draw.integers(0, vocab_size, (shape.turns - 1, shape.rows, shape.observed)).tolist()
    return Texts(prompts, observations)


def by_session(open_session: Callable[..., Any]) -> Player:
    """A generator of `tasks.generate`, whose sessions keep what they have read from turn to turn."""

    def play(texts: Texts, shape: Shape) -> float:
        rows = range(shape.rows)
        start = time.perf_counter()
        session = open_session(texts.prompts, shape.copies, Sampling(1.0, 1.0, (), 0), shape.total)
        for turn in range(shape.turns):
            if turn:
                session.append(rows, texts.observations[turn - 1])
            calls = session.generate(rows, [shape.written] * shape.rows)
            _require_written([len(call.token_ids) for call in calls], shape.written)
        session.close(rows)
        return time.perf_counter() - start

    return play


def by_generate(model: Any, keeps_cache: bool = False, **options: Any) -> Player:
    """`generate` of transformers.

    Args:
        model: causal LM.
        keeps_cache: hand the keys and values of a turn to the next one, which then reads only the observation. That
            works because all rows have the same length; rollouts do not, and TRL reads everything again.
        options: of `GenerationConfig`.
    """
    import torch
    from transformers import GenerationConfig

    def play(texts: Texts, shape: Shape) -> float:
        # `generate` fills what is None here from the model's own settings, so the model gets these.
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=shape.written, pad_token_id=0,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        start = time.perf_counter()
        ids = torch.tensor(texts.prompts).repeat_interleave(shape.copies, 0)  # [rows, T]
        cache = None
        for turn in range(shape.turns):
            if turn:
                ids = torch.cat([ids, torch.tensor(texts.observations[turn - 1])], 1)
            more = {"past_key_values": cache} if cache is not None else {}
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
            _require_written([output.sequences.shape[1] - ids.shape[1]], shape.written)
            ids, cache = output.sequences, output.past_key_values if keeps_cache else None
        return time.perf_counter() - start

    return play


def _require_written(found: Sequence[int], expected: int) -> None:
    if set(found) != {expected}:
        raise ValueError(f"found calls of {min(found)} to {max(found)} tokens, expected {expected} in each.")


def beside_transformers(folder: Path, dtype: str, shapes: dict[str, Shape], threads: int) -> dict[str, Any]:
    """Our plain generator beside `generate`, with one model in memory, in both orders; see `in_both_orders`."""
    from tasks.device import use_threads
    from tasks.generate.plain import PlainGenerator
    from tasks.model import computes_in, load_policy, pick_device

    use_threads(threads)
    precision = computes_in(dtype, pick_device())  # type: ignore[arg-type]
    model, tokenizer = load_policy(folder, precision)
    generator = PlainGenerator(model, tokenizer)
    generator.eos_ids = frozenset()  # Every call is written to its end.
    players = {
        "ours": by_session(generator.open),
        "generate": by_generate(model),
        "generate, static cache": by_generate(model, cache_implementation="static", disable_compile=True),
        KEPT: by_generate(model, keeps_cache=True),
    }
    return in_both_orders(players, shapes, model.config.vocab_size) | {"dtype": str(precision)}


def beside_vllm(folder: Path, dtype: str, shapes: dict[str, Shape], threads: int, root: Path) -> dict[str, Any]:
    """Our plain generator beside vLLM with the engine options of conf/generator/vllm.yaml, in both orders."""
    import os

    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from tasks.device import use_threads
    from tasks.generate import load
    from tasks.generate.plain import PlainGenerator
    from tasks.generate.vllm import VllmConf, VllmSession
    from tasks.model import computes_in, load_policy, pick_device

    class EndlessSession(VllmSession):
        """Every call is written to its end."""

        def _params(self, row: int, budget: int) -> Any:
            params = super()._params(row, budget)
            params.ignore_eos = True
            return params

    conf = load("vllm", root)
    assert isinstance(conf, VllmConf)
    longest = max(shape.total for shape in shapes.values()) + 1
    vllm = replace(conf, max_model_len=max(longest, 64)).start(folder, dtype)  # type: ignore[arg-type]
    try:
        vllm._end_ids = frozenset()
        use_threads(threads)  # vLLM may have changed them.
        precision = computes_in(dtype, pick_device())  # type: ignore[arg-type]
        model, tokenizer = load_policy(folder, precision)
        generator = PlainGenerator(model, tokenizer)
        generator.eos_ids = frozenset()
        players = {
            "ours": by_session(generator.open),
            "vLLM": by_session(lambda *words: EndlessSession(vllm, *words)),
        }
        return in_both_orders(players, shapes, model.config.vocab_size) | {"dtype": str(precision)}
    finally:
        vllm.shutdown()


def in_both_orders(players: dict[str, Player], shapes: dict[str, Shape], vocab_size: int) -> dict[str, Any]:
    """Seconds of each play, each player twice: in the order of `players`, and backwards.

    Args:
        players: ours is the first.
        shapes: by name; the first has one turn.
        vocab_size: of random ids.

    Returns:
        `seconds[shape][player]` of both orders. Shape `reading` is the first shape with a single written token: what
        that shape takes beyond it is its decoding.
    """
    first = next(iter(shapes))
    all_shapes = {READING: replace(shapes[first], written=1), **shapes}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in all_shapes}
    for number, player in enumerate([*players, *reversed(players)]):
        play = players[player]
        warm = Shape(1, 2, 16, 1, 2)
        play(random_texts(warm, vocab_size, 10_000 + number), warm)  # First calls prepare kernels and memory.

        for at, (title, shape) in enumerate(all_shapes.items()):
            if player == KEPT and shape.turns == 1:
                continue  # Nothing is kept where there is one turn.
            taken = play(random_texts(shape, vocab_size, 10 * number + at), shape)
            seconds[title].setdefault(player, []).append(taken)
            print(f"  {player}; {title}: {taken:.2f} s", flush=True)
    return {"seconds": seconds}


def rates(found: dict[str, Any], shapes: dict[str, Shape]) -> list[tuple[str, dict[str, list[float]]]]:
    """Tokens a second by row of the table: player -> both orders."""
    seconds = found["seconds"]
    first = next(iter(shapes))
    whole = [
        (name, {player: [shape.tokens / taken for taken in both] for player, both in seconds[name].items()})
        for name, shape in shapes.items()
    ]
    more = shapes[first].tokens - shapes[first].rows
    alone = {
        player: [more / max(taken - read, 1e-9) for taken, read in zip(both, seconds[READING][player], strict=True)]
        for player, both in seconds[first].items()
    }
    return [(f"{first}, decoding alone", alone), *whole]
