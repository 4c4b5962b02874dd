"""The plain generator against a full forward per token, transformers' generate, and hand-forced draws."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.generate import Sampling, WeightsError
from tasks.generate.plain import PlainGenerator, PlainSession, inverse_cdf, nucleus
from tests.tiny import logits_of, logprobs_of, make_model

GREEDY = Sampling(0.0, 1.0, (), 0)
STOPS = ("</search>", "</answer>")
PROMPTS = [[5, 9, 17, 3, 40, 41, 42], [8], [100, 7, 7], [33, 200, 14, 15, 92, 65, 35, 89, 79, 32, 38]]
KINDS = {"plain": {}, "gqa": {"kv_heads": 2}, "untied": {"tied": False}, "gqa untied": {"kv_heads": 1, "tied": False}}


@pytest.fixture(scope="module", params=KINDS)
def any_model(request: Any, tokenizer: Any) -> Any:
    return make_model(tokenizer, seed=3, **KINDS[request.param])


class Forced:
    """Replaces the draw: row r gets `tokens[r]` one after the other."""

    def __init__(self, session: PlainSession, tokens: list[list[int]]) -> None:
        self.left: list[Iterator[int]] = [iter(t) for t in tokens]
        session._sample = self  # type: ignore[method-assign]

    def __call__(self, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        return [next(self.left[row]) for row in rows], [0.0] * len(rows)


def test_greedy_equals_transformers(any_model: Any, tokenizer: Any) -> None:
    session = PlainGenerator(any_model, tokenizer).open(PROMPTS, 1, GREEDY, 100)
    calls = session.generate([0, 1, 2, 3], [12, 5, 12, 9])
    for prompt, call, budget in zip(PROMPTS, calls, [12, 5, 12, 9], strict=True):
        ids = torch.tensor([prompt])
        wanted = any_model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=budget)
        assert list(call.token_ids) == [t for t in wanted[0, len(prompt) :].tolist() if t != tokenizer.eos_token_id]
        assert not call.stopped


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 1.0, (), 5), Sampling(0.7, 0.9, (), 6)])
def test_several_turns_equal_a_full_forward(any_model: Any, tokenizer: Any, sampling: Sampling) -> None:
    """Ragged rows, three turns, rows leaving at different times: every draw and logprob is that of a fresh forward."""
    session = PlainGenerator(any_model, tokenizer).open(PROMPTS, 3, sampling, 120)
    texts = [list(p) for p in PROMPTS for _ in range(3)]
    turns = [
        (list(range(12)), [1 + (5 * r) % 9 for r in range(12)]),
        ([11, 2, 7, 4, 0, 9], [6, 2, 9, 1, 30, 3]),  # in any order, half of them gone
        ([4, 11, 2], [3, 40, 2]),
        ([0, 9], [5, 5]),  # rows that sat out a turn
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
                drawn = inverse_cdf(probs, torch.tensor([session.uniforms[row, start + i]]))
                assert token == int(drawn)
        added = [[(7 * r + i) % 256 for i in range(1 + r % 5)] for r in rows]
        session.append(rows, added)
        for row, ids in zip(rows, added, strict=True):
            texts[row] += ids


def test_draws_do_not_depend_on_who_else_plays(model: Any, tokenizer: Any) -> None:
    generator, sampling = PlainGenerator(model, tokenizer), Sampling(1.0, 1.0, (), 11)
    whole = generator.open(PROMPTS, 2, sampling, 64)
    together = whole.generate(list(range(8)), [20] * 8)
    alone = generator.open(PROMPTS, 2, sampling, 64)
    assert [alone.generate([row], [20])[0].token_ids for row in (6, 1, 3)] == [together[r].token_ids for r in (6, 1, 3)]
    fewer = generator.open(PROMPTS[:2], 2, sampling, 64)
    assert [c.token_ids for c in fewer.generate([0, 1, 2, 3], [20] * 4)] == [c.token_ids for c in together[:4]]
    assert together[0].token_ids != together[1].token_ids  # members of a group differ
    halves = generator.open(PROMPTS, 2, sampling, 64)
    first, second = halves.generate([5], [9])[0], halves.generate([5], [11])[0]
    assert first.token_ids + second.token_ids == together[5].token_ids  # a call may be continued


def test_seeds(model: Any, tokenizer: Any) -> None:
    def draw(seed: int) -> list[tuple[int, ...]]:
        session = PlainGenerator(model, tokenizer).open(PROMPTS, 1, Sampling(1.0, 1.0, (), seed), 64)
        return [c.token_ids for c in session.generate([0, 1, 2, 3], [8] * 4)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_counts_are_exact(model: Any, tokenizer: Any) -> None:
    """A prompt is read once for its group, but for its last token, which each row reads with its first draw."""
    session = PlainGenerator(model, tokenizer).open(PROMPTS, 5, GREEDY, 100)
    assert session.num_prefilled == sum(len(p) - 1 for p in PROMPTS) + 5 * len(PROMPTS)
    Forced(session, [[1, 2, tokenizer.eos_token_id], *[[1, 2, 3]] * 19])
    calls = session.generate(list(range(20)), [3] * 20)
    assert [len(c.token_ids) for c in calls] == [2] + [3] * 19
    assert session.num_generated == 60  # the end-of-text token was sampled too
    before = session.num_prefilled
    session.append([0, 1], [[4, 5, 6], [7]])
    assert session.num_prefilled == before + 4


def test_rows_of_equal_text_are_read_as_one(any_model: Any, tokenizer: Any) -> None:
    """Rows 0, 2 and 3 share text, as do 4 and 5; 1 wrote something else, 6 got another observation, 7 has ended."""
    sampling = Sampling(1.0, 1.0, (), 5, share_reading=True)
    session = PlainGenerator(any_model, tokenizer).open(PROMPTS[:2], 4, sampling, 120)
    written = [[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3], [4], [4], [4], [4]]
    Forced(session, written)
    session.generate(list(range(8)), [len(one) for one in written])
    del session._sample  # type: ignore[method-assign]
    session.close([7])

    found, other = [20, 21, 22, 23], [20, 21, 22, 24, 25]
    observed = [found, found, found, found, other, other, found]
    session.append(list(range(7)), observed)
    before, read = session.num_prefilled, _counting(session)
    rows = [6, 3, 5, 1, 0, 4, 2]
    calls = session.generate(rows, [7] * 7)
    assert read[0] == 4, "of seven rows, four have a text of their own"
    assert before - session.num_prefilled == 2 * len(found) + len(other)

    texts = {row: PROMPTS[row // 4] + written[row] + observed[row] for row in rows}
    for row, call in zip(rows, calls, strict=True):
        wanted = logprobs_of(any_model, texts[row] + list(call.token_ids), len(texts[row]))
        torch.testing.assert_close(torch.tensor(call.logprobs), wanted, rtol=0, atol=1e-5)
    alone = PlainGenerator(any_model, tokenizer).open(PROMPTS[:2], 4, replace(sampling, share_reading=False), 120)
    Forced(alone, written)
    alone.generate(list(range(8)), [len(one) for one in written])
    del alone._sample  # type: ignore[method-assign]
    alone.append(list(range(7)), observed)
    assert [call.token_ids for call in alone.generate(rows, [7] * 7)] == [call.token_ids for call in calls]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    ("ends", "common"), [([[7, 8, 9], [5, 5], [5, 6, 7, 8]], 4), ([[9], [9], [9]], 3), ([[], [7, 8]], 2)]
)
def test_prompts_read_their_common_beginning_once(
    any_model: Any, tokenizer: Any, ends: list[list[int]], common: int, copies: int
) -> None:
    """The newest token of a prompt, and one before it, are read by every prompt for itself."""
    prompts = [[11, 12, 13, 14, *end] for end in ends]
    shared = PlainGenerator(any_model, tokenizer).open(prompts, copies, replace(GREEDY, share_reading=True), 60)
    alone = PlainGenerator(any_model, tokenizer).open(prompts, copies, GREEDY, 60)
    assert alone.num_prefilled - shared.num_prefilled == common * (len(prompts) - 1)

    rows = list(range(len(prompts) * copies))
    calls = [session.generate(rows, [9] * len(rows)) for session in (shared, alone)]
    for mine, other in zip(*calls, strict=True):
        assert mine.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)


def test_prompts_with_nothing_in_common_are_read_as_they_were(any_model: Any, tokenizer: Any) -> None:
    for prompts in ([[1, 2, 3], [2, 2, 3]], [[1], [1]], [[4, 5, 6]]):
        counts = [
            PlainGenerator(any_model, tokenizer)
            .open(prompts, 2, replace(GREEDY, share_reading=share), 60)
            .num_prefilled
            for share in (False, True)
        ]
        assert counts[0] == counts[1]


def test_forks_share_what_is_read_after_them(model: Any, tokenizer: Any) -> None:
    session = PlainGenerator(model, tokenizer).open([[1, 2, 3]], 2, replace(GREEDY, share_reading=True), 60)
    session.append([0], [[8, 9]])
    forks = session.fork(0, 2)
    rows = [0, 1, *forks]
    session.append(rows, [[30, 31]] * 4)
    read = _counting(session)
    calls = session.generate(rows, [4] * 4)
    assert read[0] == 2
    assert calls[0] == calls[2] == calls[3] != calls[1]
    whole = PlainGenerator(model, tokenizer).open([[1, 2, 3, 8, 9, 30, 31]], 1, GREEDY, 60).generate([0], [4])
    assert calls[0].token_ids == whole[0].token_ids


def _counting(session: PlainSession) -> list[int]:
    """The number of rows of every forward pass from now on."""
    read: list[int] = []
    forward = session._forward

    def counted(chunks: list[list[int]], starts: Any) -> torch.Tensor:
        read.append(len(chunks))
        return forward(chunks, starts)

    session._forward = counted  # type: ignore[method-assign]
    return read


def test_budgets(model: Any, tokenizer: Any) -> None:
    session = PlainGenerator(model, tokenizer).open([[1, 2, 3]], 2, GREEDY, 10)
    Forced(session, [[4] * 20, [4] * 20])
    assert [len(c.token_ids) for c in session.generate([0, 1], [2, 99])] == [2, 7]  # 3 + 7 is the row's whole length
    with pytest.raises(ValueError, match="max_total_tokens=10"):
        session.generate([1], [1])
    with pytest.raises(ValueError, match="6 tokens more than"):
        session.append([0], [[1] * 6])
    session.append([0], [[1] * 5])
    with pytest.raises(ValueError, match="room for 0"):
        session.generate([0], [1])


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 10]])
def test_prompts_that_cannot_be_played(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"prompt \d: found (0|10) tokens, expected 1 to 9"):
        PlainGenerator(model, tokenizer).open(prompts, 1, GREEDY, 10)


def test_wrong_requests(model: Any, tokenizer: Any) -> None:
    session = PlainGenerator(model, tokenizer).open([[1, 2, 3]], 2, GREEDY, 10)
    with pytest.raises(ValueError, match="different rows"):
        session.generate([0, 0], [1, 1])
    with pytest.raises(ValueError, match="budget 0"):
        session.generate([0], [0])
    assert session.generate([], []) == []


def test_end_of_text(any_model: Any, tokenizer: Any) -> None:
    """It ends the call, is not part of it, and leaves no trace in the context of the next one."""
    session = PlainGenerator(any_model, tokenizer).open(PROMPTS[:2], 1, GREEDY, 60)
    sample = session._sample
    Forced(session, [[30, tokenizer.eos_token_id], [31, 32, 33]])
    first = session.generate([0, 1], [3, 3])
    assert [c.token_ids for c in first] == [(30,), (31, 32, 33)]
    assert not first[0].stopped
    with pytest.raises(ValueError, match="0 tokens to read"):
        session.generate([0], [1])
    session._sample = sample  # type: ignore[method-assign]
    session.append([0, 1], [[50, 51], [52]])
    for call, before in zip(
        session.generate([0, 1], [6, 6]), (PROMPTS[0] + [30, 50, 51], PROMPTS[1] + [31, 32, 33, 52]), strict=True
    ):
        wanted = logprobs_of(any_model, before + list(call.token_ids), len(before))
        torch.testing.assert_close(torch.tensor(call.logprobs), wanted, rtol=0, atol=1e-5)


# Stop strings -----------------------------------------------------------------------------------------------------


def _stops_after(
    tokenizer: Any, model: Any, calls: list[list[int]], appended: list[int] | None = None
) -> list[tuple[int, bool]]:
    ids = [i for call in calls for i in call]
    session = PlainGenerator(model, tokenizer).open([[1, 2]], 1, Sampling(1.0, 1.0, STOPS, 0), 400)
    Forced(session, [ids])
    found = []
    for number, _ in enumerate(calls):
        if number and appended:
            session.append([0], [appended])
        call = session.generate([0], [200 if number < len(calls) - 1 else len(ids) - sum(n for n, _ in found)])[0]
        found.append((len(call.token_ids), call.stopped))
    return found


def test_stop_string_split_over_tokens(merging: Any) -> None:
    model = make_model(merging)
    text = "<think> see </think> <search> Avenor </search>"
    ids = merging.encode(text)
    assert len(merging.encode("</search>")) >= 3
    assert _stops_after(merging, model, [[*ids, 1, 1, 1]]) == [(len(ids), True)]
    single = [i for char in text for i in merging.encode(char)]  # one byte a token
    assert len(single) == len(text)
    assert _stops_after(merging, model, [[*single, 1, 1]]) == [(len(single), True)]


def test_token_that_holds_more_than_the_end_of_the_stop_string(merging: Any) -> None:
    model = make_model(merging)
    ids = merging.encode("<answer> Hask </answer>\n\n")
    assert merging.decode(ids[-1]).startswith(">\n")  # else this test shows nothing
    assert _stops_after(merging, model, [[*ids, 1, 1]]) == [(len(ids), True)]


def test_other_closing_signs_do_not_stop(merging: Any) -> None:
    ids = merging.encode("a > b </think> <search> x <answer> y </searc h>")
    assert _stops_after(merging, make_model(merging), [ids]) == [(len(ids), False)]


def test_stop_string_that_begins_in_the_call_before(merging: Any) -> None:
    """A call continued after a stray closing tag: the tag seen before stops nothing, the next one does."""
    model = make_model(merging)
    first = merging.encode("x </answer")
    crossing = next(i for i in range(len(merging)) if merging.decode([i]) == "></")
    rest = merging.encode("search>")
    more = merging.encode(" and > so")
    assert _stops_after(merging, model, [[*first, crossing], [*rest, 1, 1]]) == [
        (len(first) + 1, True),
        (len(rest), True),
    ]
    assert _stops_after(merging, model, [[*first, crossing], more]) == [(len(first) + 1, True), (len(more), False)]


def test_an_observation_completes_no_stop_string(merging: Any) -> None:
    model = make_model(merging)
    first, rest = merging.encode("x </answer>"), merging.encode("ch> y </search>")
    cut = merging.encode(" </sear")
    assert _stops_after(merging, model, [first, [*rest, 1]], appended=cut) == [(len(first), True), (len(rest), True)]


def test_single_token_stop(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("<think> Hask </think> <answer> Hask </answer>")
    assert len(tokenizer.encode(" </answer>")) == 1
    assert _stops_after(tokenizer, model, [[*ids, 1]]) == [(len(ids), True)]


# Draws ------------------------------------------------------------------------------------------------------------

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=2, max_size=12).filter(any)


@settings(max_examples=300)
@given(weights, st.floats(0, 1, exclude_max=True, width=32))
def test_a_draw_never_has_probability_zero(row: list[float], uniform: float) -> None:
    probs = torch.tensor([row]) / sum(row)
    token = int(inverse_cdf(probs, torch.tensor([uniform])))
    assert probs[0, token] > 0
    # A slow second route: walk the cumulative sum.
    target = uniform * float(probs.double().sum())
    sums = itertools.accumulate(probs[0].double().tolist())
    assert token == next(i for i, total in enumerate(sums) if total > target)


def test_draws_follow_the_probabilities() -> None:
    uniforms = (torch.arange(1000) + 0.5) / 1000
    tokens = inverse_cdf(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(1000, 5), uniforms)
    assert torch.bincount(tokens, minlength=5).tolist() == [0, 250, 0, 750, 0]


def test_extreme_uniforms() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).expand(2, 4)
    assert inverse_cdf(probs, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 2]


@settings(max_examples=200)
@given(weights, st.floats(0.01, 0.999))
def test_nucleus_is_the_smallest_set_that_reaches_the_mass(row: list[float], top_p: float) -> None:
    probs = torch.tensor([row], dtype=torch.float64) / sum(row)
    kept = nucleus(probs, top_p)[0]
    inside = kept > 0
    assert float(kept.sum()) >= top_p - 1e-9
    assert torch.equal(kept[inside], probs[0][inside])
    smallest = float(kept[inside].min())
    assert float(kept.sum()) - smallest < top_p + 1e-9
    outside = probs[0][~inside]
    assert not len(outside) or float(outside.max()) <= smallest


def test_a_tiny_nucleus_is_greedy(model: Any, tokenizer: Any) -> None:
    generator = PlainGenerator(model, tokenizer)
    greedy = generator.open(PROMPTS, 1, GREEDY, 60).generate([0, 1, 2, 3], [10] * 4)
    drawn = generator.open(PROMPTS, 1, Sampling(1.0, 1e-6, (), 3), 60).generate([0, 1, 2, 3], [10] * 4)
    assert [c.token_ids for c in greedy] == [c.token_ids for c in drawn]


# Weights ----------------------------------------------------------------------------------------------------------


def zeroed(model: Any) -> Any:
    """A model of the same architecture whose weights are all 0."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    return own


def reusing(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A source that gathers each weight in one buffer and poisons it afterwards, as a sharded engine may."""
    buffer = torch.empty(max(p.numel() for p in model.parameters()))
    for name, parameter in model.named_parameters():
        view = buffer[: parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        yield name, view
        buffer.fill_(float("nan"))


def test_new_weights_from_a_source(any_model: Any, tokenizer: Any) -> None:
    generator = PlainGenerator(zeroed(any_model), tokenizer)
    generator.update_weights(reusing(any_model))
    played = [
        g.open(PROMPTS, 1, GREEDY, 60).generate([0, 3], [9, 9])
        for g in (generator, PlainGenerator(any_model, tokenizer))
    ]
    assert played[0] == played[1]


def test_shared_weights_are_not_asked_for(any_model: Any, tokenizer: Any) -> None:
    def unread() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    PlainGenerator(any_model, tokenizer, shares_weights=True).update_weights(unread())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w[:-1], r"model\.norm\.weight is missing, and 0 others"),
        (lambda w: [], r"is missing, and \d\d others"),
        (lambda w: [*w, w[3]], "comes twice. Expected every weight of the policy once"),
        (lambda w: [*w, ("lm_head.extra", w[0][1])], r"lm_head\.extra is unknown. Expected the \d\d weights"),
        (lambda w: [(w[0][0], w[0][1][1:]), *w[1:]], r"has shape \[\d+, 32\], expected \[\d+, 32\]. Give the whole"),
        (lambda w: [(w[0][0], w[0][1].reshape(-1)), *w[1:]], r"has shape \[\d+\], expected"),
        (lambda w: [*w[:-1], (w[-1][0], w[-1][1] * math.nan)], r"norm\.weight holds NaN or infinity, expected finite"),
        (lambda w: [(w[0][0], w[0][1] / 0), *w[1:]], "holds NaN or infinity, expected finite numbers"),
    ],
)
def test_a_source_that_is_not_the_policy_changes_nothing(
    model: Any, tokenizer: Any, spoil: Callable[[list[Any]], list[Any]], words: str
) -> None:
    own = zeroed(model)
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    with pytest.raises(WeightsError, match=words) as caught:
        PlainGenerator(own, tokenizer).update_weights(iter(spoil(weights)))
    assert "\n" not in str(caught.value)
    assert not any(p.any() for p in own.parameters())


def test_attention_that_would_be_read_wrongly(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    def small(cls: Any, **more: Any) -> Any:
        return cls(
            vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=16, **more,
        )  # fmt: skip

    windowed = small(Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window=8"):
        PlainGenerator(AutoModelForCausalLM.from_config(windowed).eval(), tokenizer)
    eager = AutoModelForCausalLM.from_config(small(Qwen2Config), attn_implementation="eager")
    with pytest.raises(ValueError, match="'eager'"):
        PlainGenerator(eager.eval(), tokenizer)
