"""Forked rows of the plain generator: their draws, what they read, and rows that can not be forked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator, PlainSession
from tests.tiny import logprobs_of, make_model

GREEDY, SAMPLED = Sampling(0.0, 1.0, (), 0), Sampling(1.0, 1.0, (), 5)
PROMPT, SEEN = [5, 9, 17, 3, 40, 41, 42], [8, 9, 10, 11]
ROOM = 90


def open_session(model: Any, tokenizer: Any, prompts: list[list[int]], rows: int, sampling: Sampling) -> PlainSession:
    return PlainGenerator(model, tokenizer).open(prompts, rows, sampling, ROOM)


def texts(session: PlainSession, rows: list[int], budget: int) -> list[tuple[int, ...]]:
    return [call.token_ids for call in session.generate(rows, [budget] * len(rows))]


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.7, 0.9, (), 6)])
@pytest.mark.parametrize("seen", [[], [7], SEEN])
def test_a_fork_draws_like_the_row_of_its_number(
    model: Any, tokenizer: Any, sampling: Sampling, seen: list[int]
) -> None:
    """Whoever reads the whole prefix anew, in a session opened with as many rows, draws the same tokens."""
    session = open_session(model, tokenizer, [PROMPT], 1, sampling)
    prefix = [*PROMPT, *texts(session, [0], 6)[0], *seen]
    if seen:
        session.append([0], [seen])
    first, second = session.fork(0, 2), session.fork(0, 1)
    assert (first, second) == ([1, 2], [3])
    anew = open_session(model, tokenizer, [prefix], 4, sampling)
    assert anew.uniforms.tolist() == session.uniforms.tolist()
    assert texts(session, [3, 0, 2, 1], 20) == texts(anew, [3, 0, 2, 1], 20)
    assert len(set(texts(session, [0, 1, 2, 3], 9))) == 4


def test_a_fork_of_a_fork_writes_what_a_full_forward_computes(model: Any, tokenizer: Any) -> None:
    """Several prompts, turns and generations of forks; slots of closed rows are taken again."""
    session = open_session(model, tokenizer, [PROMPT, [8], [100, 7, 7]], 2, SAMPLED)
    known = {row: list(prompt) for row, prompt in enumerate([PROMPT, PROMPT, [8], [8], [100, 7, 7], [100, 7, 7]])}

    def play(rows: list[int]) -> None:
        for row, call in zip(rows, session.generate(rows, [5] * len(rows)), strict=True):
            wanted = logprobs_of(model, [*known[row], *call.token_ids], len(known[row]))
            torch.testing.assert_close(torch.tensor(call.logprobs), wanted, rtol=0, atol=1e-5)
            known[row] += call.token_ids
        session.append(rows, [SEEN[: 1 + row % 4] for row in rows])
        for row in rows:
            known[row] += SEEN[: 1 + row % 4]

    def fork(row: int, times: int) -> list[int]:
        new_rows = session.fork(row, times)
        known.update({new: list(known[row]) for new in new_rows})
        return new_rows

    play([0, 1, 2, 3, 4, 5])
    children = fork(3, 3)
    play([3, *children])
    session.close([0, 1, 6, 8])
    slots = len(session.row_of)
    grandchildren = [*fork(7, 2), *fork(2, 2)]
    assert len(session.row_of) == slots  # The four slots that were left are enough.
    play([*grandchildren, 3, 5])
    play([2, 4, 7, *grandchildren, *fork(grandchildren[-1], 3)])


def test_a_forked_session_may_grow_past_the_width_of_its_cache(model: Any, tokenizer: Any) -> None:
    session = open_session(model, tokenizer, [PROMPT], 4, SAMPLED)
    assert session.fork(0, 1) == [4]  # More slots are added than one fork needs.
    (call,) = session.generate([4], [80])
    wanted = logprobs_of(model, [*PROMPT, *call.token_ids], len(PROMPT))
    torch.testing.assert_close(torch.tensor(call.logprobs), wanted, rtol=0, atol=1e-5)
    assert len(call.token_ids) > 64 - len(PROMPT)


@pytest.mark.parametrize("length", range(62, 68))
def test_a_row_that_fills_its_cache_can_be_forked(model: Any, tokenizer: Any, length: int) -> None:
    """The cache grows by 64 positions: one of these rows fills it to the last."""
    prompt = [(7 * i) % 90 + 5 for i in range(length)]
    session = open_session(model, tokenizer, [prompt], 1, SAMPLED)
    written = texts(session, [0], 1)[0]
    assert session.fork(0, 2) == [1, 2]
    anew = open_session(model, tokenizer, [[*prompt, *written]], 3, SAMPLED)
    assert texts(session, [0, 1, 2], 8) == texts(anew, [0, 1, 2], 8)


def test_the_prefix_is_read_once(model: Any, tokenizer: Any) -> None:
    """A fork costs one token a row: the newest, which every row reads with its next draw."""
    session = open_session(model, tokenizer, [PROMPT], 1, GREEDY)
    assert session.num_prefilled == len(PROMPT)
    assert session.fork(0, 4) == [1, 2, 3, 4]
    assert session.num_prefilled == len(PROMPT) + 4
    assert session.num_prefilled == open_session(model, tokenizer, [PROMPT], 5, GREEDY).num_prefilled
    texts(session, [2], 3)
    session.append([2], [SEEN])
    read: list[int] = []
    forward = session._forward
    session._forward = lambda chunks, starts: read.append(sum(map(len, chunks))) or forward(chunks, starts)  # type: ignore[method-assign, func-returns-value]
    before = session.num_prefilled
    session.fork(2, 6)
    texts(session, [2, 5, 6, 7, 8, 9, 10], 1)
    assert session.num_prefilled - before == 6
    # The third token written and all of the observation but its last token, once; then one token a row.
    assert read == [len(SEEN), 7]


def test_a_fork_of_a_row_that_ended_its_text_waits_for_an_observation(model: Any, tokenizer: Any) -> None:
    session = open_session(model, tokenizer, [PROMPT], 1, GREEDY)
    sample = session._sample
    session._sample = lambda logits, rows: ([tokenizer.eos_token_id], [0.0])  # type: ignore[method-assign]
    assert texts(session, [0], 3) == [()]
    session._sample = sample  # type: ignore[method-assign]
    (new,) = session.fork(0, 1)
    with pytest.raises(ValueError, match="0 tokens to read"):
        session.generate([new], [1])
    session.append([0, new], [SEEN, SEEN])
    assert len(set(texts(session, [0, new], 5))) == 1


def test_a_stop_string_that_began_before_the_fork_stops_its_rows(merging: Any) -> None:
    model = make_model(merging)
    session = PlainGenerator(model, merging).open([[1, 2]], 1, Sampling(1.0, 1.0, ("</search>",), 0), ROOM)
    line = [*merging.encode("so </sear"), *merging.encode("ch>")]
    left = {0: iter(line), 1: iter(line[len(merging.encode("so </sear")) :])}
    session._sample = lambda logits, rows: ([next(left[row]) for row in rows], [0.0] * len(rows))  # type: ignore[method-assign]
    session.generate([0], [len(merging.encode("so </sear"))])
    session.fork(0, 1)
    assert session.generate([1], [30])[0].stopped


def test_what_one_row_reads_or_writes_is_not_in_its_siblings(model: Any, tokenizer: Any) -> None:
    """Observations and tokens of a row, its forks and forks of those, in any order, against rows that share nothing."""
    session = open_session(model, tokenizer, [PROMPT], 1, GREEDY)
    written = texts(session, [0], 3)[0]
    first, second = session.fork(0, 2)
    session.append([0, first], [SEEN, SEEN[:2]])
    (third,) = session.fork(0, 1)
    session.append([third], [[70]])
    known = {0: SEEN, first: SEEN[:2], second: [], third: [*SEEN, 70]}
    for row, seen in known.items():
        alone = open_session(model, tokenizer, [[*PROMPT, *written, *seen]], 1, GREEDY)
        assert texts(session, [row], 6) == texts(alone, [0], 6)


def test_halves_of_a_stop_string_in_two_forks_stop_neither(merging: Any) -> None:
    model = make_model(merging)
    session = PlainGenerator(model, merging).open([[1, 2]], 1, Sampling(1.0, 1.0, ("</search>",), 0), ROOM)
    start, end = merging.encode("so </sear"), merging.encode("ch>")
    assert merging.decode([*start, *end]) == "so </search>"
    tokens = {1: iter(start), 2: iter(end)}
    session._sample = lambda logits, rows: ([next(tokens[row]) for row in rows], [0.0] * len(rows))  # type: ignore[method-assign]
    session.fork(0, 2)
    assert not session.generate([1], [len(start)])[0].stopped
    assert not session.generate([2], [len(end)])[0].stopped


def test_rows_that_cannot_be_forked(model: Any, tokenizer: Any) -> None:
    session = open_session(model, tokenizer, [PROMPT], 2, GREEDY)
    with pytest.raises(ValueError, match="row 0: found times=0, expected at least 1"):
        session.fork(0, 0)
    with pytest.raises(ValueError, match=r"row 2: unknown\. Expected an open row of 0 to 1"):
        session.fork(2, 1)
    session.close([0])
    for request in (
        lambda: session.fork(0, 1),
        lambda: session.generate([0], [1]),
        lambda: session.append([0], [SEEN]),
    ):
        with pytest.raises(ValueError, match="row 0: closed, 1 other rows are open"):
            request()
    (new,) = session.fork(1, 1)
    session.close([1, new])
    with pytest.raises(ValueError, match=r"row 1: the session is closed, all its 3 rows are\. Open a new session"):
        session.fork(1, 1)
