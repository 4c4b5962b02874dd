"""Rows that know nothing of one another: a full forward per token, and the same bits in any company."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.generate import Call, Sampling
from tasks.generate.plain import inverse_cdf, nucleus
from tasks.generate.rows import RowsGenerator, RowsSession
from tests.generate.test_plain import GREEDY, KINDS, PROMPTS
from tests.tiny import logits_of, logprobs_of, make_model, make_tokenizer

DRAWN = Sampling(1.0, 1.0, (), 5)


@pytest.fixture(scope="module", params=KINDS)
def any_model(request: Any, tokenizer: Any) -> Any:
    return make_model(tokenizer, seed=3, **KINDS[request.param])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(0.7, 0.9, (), 6)])
def test_several_turns_equal_a_full_forward(any_model: Any, tokenizer: Any, sampling: Sampling) -> None:
    session = RowsGenerator(any_model, tokenizer).open(PROMPTS, 3, sampling, 120)
    texts = [list(p) for p in PROMPTS for _ in range(3)]
    turns = [
        (list(range(12)), [1 + (5 * r) % 9 for r in range(12)]),
        ([11, 2, 7, 4, 0, 9], [6, 2, 9, 1, 30, 3]),
        ([4, 11, 2], [3, 40, 2]),
        ([0], [5]),
    ]
    for rows, budgets in turns:
        for row, budget, call in zip(rows, budgets, session.generate(rows, budgets), strict=True):
            start = len(texts[row])
            texts[row] += call.token_ids
            assert len(call.token_ids) == len(call.logprobs) <= budget
            table = logits_of(any_model, texts[row])
            wanted = logprobs_of(any_model, texts[row], start)
            torch.testing.assert_close(torch.tensor(call.logprobs), wanted, rtol=0, atol=1e-5)
            for i, token in enumerate(call.token_ids):
                logits = table[start + i - 1]
                if sampling.temperature == 0:
                    assert token == int(logits.argmax())
                    continue
                probs = nucleus((logits[None] / sampling.temperature).softmax(-1), sampling.top_p)
                drawn = inverse_cdf(probs, torch.tensor([session._rows[row].uniforms[start + i]]))
                assert token == int(drawn)
        added = [[(7 * r + i) % 256 for i in range(1 + r % 5)] for r in rows]
        session.append(rows, added)
        for row, ids in zip(rows, added, strict=True):
            texts[row] += ids


def two_turns(session: RowsSession, rows: list[int], seed: int, first: int = 0) -> dict[int, list[Call]]:
    """Each row writes, reads an observation of its own, and writes again; rows mix as the seed says.

    `first` is the number that the session's first row has for the test.
    """
    draw = random.Random(seed)
    calls: dict[int, list[Call]] = {row: [] for row in rows}
    ready, reading = list(rows), []
    while any(len(found) < 2 for found in calls.values()):
        draw.shuffle(ready)
        for _ in range(draw.randint(0, len(ready))):
            row = ready.pop()
            session.submit(row, 4 + (first + row) % 5)
        for number, call in session.advance():
            calls[number].append(call)
            if len(calls[number]) < 2:
                reading.append(number)
        draw.shuffle(reading)
        for _ in range(draw.randint(0, len(reading))):
            row = reading.pop()
            session.append([row], [[(3 * (first + row) + i) % 200 for i in range(1 + (first + row) % 7)]])
            ready.append(row)
    return calls


@pytest.fixture(scope="module", params=[*KINDS, "wide", "wide bfloat16"])
def any_size(request: Any, tokenizer: Any) -> Any:
    """Libraries choose kernels by size and type; these two are about as wide as the policy of scale laptop."""
    made = make_model(tokenizer, seed=3, **KINDS.get(request.param, {"hidden": 256}))
    return made.bfloat16() if "bfloat16" in request.param else made


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_writes_the_same_bits_in_any_company(any_size: Any, tokenizer: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = RowsGenerator(any_size, tokenizer)
    wanted = two_turns(generator.open(PROMPTS, 3, DRAWN, 64), list(range(12)), 0)
    for seed in range(1, 6):
        assert two_turns(generator.open(PROMPTS, 3, DRAWN, 64), list(range(12)), seed) == wanted
    for row in (0, 5, 11):
        assert two_turns(generator.open(PROMPTS, 3, DRAWN, 64), [row], 9)[row] == wanted[row]
    for first in range(4):  # Each prompt in a session of its own.
        part = Sampling(1.0, 1.0, (), 5, first_row=3 * first)
        found = two_turns(generator.open(PROMPTS[first : first + 1], 3, part, 64), [0, 1, 2], first, 3 * first)
        assert [found[row] for row in range(3)] == [wanted[3 * first + row] for row in range(3)]


@functools.lru_cache(maxsize=1)
def alike() -> RowsGenerator:
    return RowsGenerator(make_model(make_tokenizer(), seed=3), make_tokenizer())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**31))
def test_any_sizes(sizes: list[int], seed: int) -> None:
    """Prompts of any lengths, in one session and alone."""
    prompts = [[(17 * i + j) % 250 for j in range(size)] for i, size in enumerate(sizes)]
    generator = alike()
    together = generator.open(prompts, 1, Sampling(1.0, 1.0, (), seed), 64).generate(
        range(len(sizes)), [5] * len(sizes)
    )
    for row, prompt in enumerate(prompts):
        alone = generator.open([prompt], 1, Sampling(1.0, 1.0, (), seed, first_row=row), 64)
        assert alone.generate([0], [5]) == [together[row]]


def test_forks_draw_as_rows_of_their_numbers_and_read_nothing_again(model: Any, tokenizer: Any) -> None:
    session = RowsGenerator(model, tokenizer).open(PROMPTS[:1], 1, DRAWN, 64)
    session.generate([0], [3])
    session.append([0], [[4, 5, 6]])
    before = session.num_prefilled
    assert session.fork(0, 2) == [1, 2]
    assert session.num_prefilled == before + 2
    calls = session.generate([0, 1, 2], [6] * 3)
    assert len({call.token_ids for call in calls}) == 3
    other = RowsGenerator(model, tokenizer).open(PROMPTS[:1], 3, DRAWN, 64)
    assert other.num_prefilled == len(PROMPTS[0]) - 1 + 3


def test_mistakes_are_named(model: Any, tokenizer: Any) -> None:
    session = RowsGenerator(model, tokenizer).open(PROMPTS, 1, GREEDY, 30)
    with pytest.raises(ValueError, match="expected different rows"):
        session.generate([1, 1], [3, 3])
    session.submit(0, 3)
    with pytest.raises(ValueError, match="no call that is not over"):
        session.submit(0, 3)
    with pytest.raises(ValueError, match="row 9: unknown"):
        session.append([9], [[1]])
    with pytest.raises(ValueError, match="row 1: 40 tokens more than max_total_tokens=30"):
        session.append([1], [[1] * 40])
    session.close([2])
    with pytest.raises(ValueError, match="row 2: closed"):
        session.fork(2, 1)
