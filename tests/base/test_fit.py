"""Supervised training of the tiny policy: the loss is the obvious one, and a killed run ends like an unbroken one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.base.demonstrations import Example
from tasks.base.fit import Fit, PhaseConf, by_length, supervised_loss
from tasks.shared_prefix import attention_to_prefixes, common_beginning
from tests.tiny import make_learner

VOCAB = 40
FIRST = PhaseConf(max_steps=7, batch=4, lr=1e-2, decay=True, stop_loss=0.0)
SECOND = PhaseConf(max_steps=26, batch=3, lr=5e-3, decay=False, stop_loss=0.0)


def _model(seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def _example(rng: random.Random) -> Example:
    length = rng.randint(2, 12)
    mask = tuple(rng.random() < 0.7 for _ in range(length - 1))
    ids = tuple(rng.randrange(VOCAB) for _ in range(length))
    return Example(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))), ids, (*mask, True))


def _sample(name: str, batch: int) -> Callable[[int], list[Example]]:
    def sample(step: int) -> list[Example]:
        rng = random.Random(f"{name}/{step}")
        return [_example(rng) for _ in range(batch)]

    return sample


def _alike(rng: random.Random, count: int) -> list[Example]:
    """Examples with instructions in common, as different questions have."""
    instructions = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 9)))
    return [replace(one, prompt_ids=instructions + one.prompt_ids) for one in (_example(rng) for _ in range(count))]


@pytest.mark.parametrize("seed", range(8))
def test_what_examples_begin_with_in_common_is_read_once_and_changes_no_gradient(seed: int) -> None:
    rng, model, read = random.Random(seed), _model(), []
    model.double()
    examples = _alike(rng, 5)
    supervised_loss(model, examples).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    decoder = model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with handle, attention_to_prefixes(decoder):
        supervised_loss(model, examples, share_reading=True).backward()
    common = common_beginning([e.prompt_ids for e in examples])
    assert sum(read) <= sum(len(e.prompt_ids + e.response_ids) - 1 for e in examples) - 4 * common
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-6)


def test_a_fit_that_shares_what_it_reads_learns_the_same(tmp_path: Path) -> None:
    def run(share_reading: bool) -> Any:
        torch.set_num_threads(1)
        model = _model()
        learner = make_learner(model, share_reading=share_reading)
        fit = Fit(learner, tmp_path / str(share_reading), 100, 48, lambda step, metrics: None, share_reading)
        fit.run("first", replace(FIRST, lr=1e-3), lambda step: _alike(random.Random(step), 4))
        return model

    shared, separate, start = run(True), run(False), _model()
    for ours, theirs, before in zip(shared.parameters(), separate.parameters(), start.parameters(), strict=True):
        assert not torch.equal(theirs, before)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@given(st.integers(0, 1000), st.integers(1, 60))
def test_a_batch_counts_what_its_examples_have_in_common_once(seed: int, most: int) -> None:
    examples = _alike(random.Random(seed), 7)
    common = common_beginning([e.prompt_ids for e in examples])
    batches = by_length(examples, most, common)
    assert sorted(map(id, (e for batch in batches for e in batch))) == sorted(map(id, examples))
    for batch in batches:
        tokens = common + sum(len(e.prompt_ids + e.response_ids) - common for e in batch)
        assert tokens <= most or len(batch) == 1


class KilledError(Exception):
    """Stands for SIGKILL: nothing is tidied up after it."""


def _run(scratch: Path, kill_at: int | None = None, checkpoint_every: int = 5) -> tuple[Any, Fit]:
    """Both phases from the newest checkpoint, killed while drawing the batch of step `kill_at`."""
    torch.set_num_threads(1)
    model = _model()
    fit = Fit(make_learner(model), scratch, checkpoint_every, 48, lambda step, metrics: None)

    def watched(sample: Callable[[int], Sequence[Example]]) -> Callable[[int], Sequence[Example]]:
        def draw(step: int) -> Sequence[Example]:
            if fit.step == kill_at:
                raise KilledError
            return sample(step)

        return draw

    fit.run("first", FIRST, watched(_sample("first", FIRST.batch)))
    fit.run("second", SECOND, watched(_sample("second", SECOND.batch)))
    return model, fit


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Fit]:
    """A run that nobody kills; no test changes it."""
    return _run(tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("kills", [[0], [3], [5], [6], [7], [8], [12, 13], [32], [1, 6, 9, 31]])
def test_a_killed_run_ends_bit_for_bit_like_an_unbroken_one(
    tmp_path: Path, unbroken: tuple[Any, Fit], kills: list[int]
) -> None:
    expected, other_fit = unbroken
    for kill in kills:
        with pytest.raises(KilledError):
            _run(tmp_path / "killed", kill)
    found, resumed = _run(tmp_path / "killed")
    for (name, ours), theirs in zip(expected.state_dict().items(), found.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert resumed.history == other_fit.history
    assert (resumed.step, resumed.finished) == (33, ["first", "second"])
    own, other = resumed.learner.optimizer.state_dict()["state"], other_fit.learner.optimizer.state_dict()["state"]
    assert all(torch.equal(own[i][key], other[i][key]) for i in own for key in own[i])


def test_a_finished_run_trains_nothing_more(tmp_path: Path) -> None:
    expected, _ = _run(tmp_path)
    found, fit = _run(tmp_path, kill_at=fit_end())
    assert fit.step == fit_end()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))


def fit_end() -> int:
    """Steps of both phases."""
    return FIRST.max_steps + SECOND.max_steps


def test_how_often_is_saved_changes_nothing(tmp_path: Path, unbroken: tuple[Any, Fit]) -> None:
    """Every step and never, beside every fifth."""
    expected, _ = unbroken
    for often in (1, 1000):
        found, _ = _run(tmp_path / str(often), checkpoint_every=often)
        assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))


def test_history_has_every_tenth_step_of_all_phases(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    fit = Fit(make_learner(_model()), tmp_path, 100, 48, lambda step, metrics: logged.append((step, metrics)))
    fit.run("first", FIRST, _sample("first", FIRST.batch))
    fit.run("second", SECOND, _sample("second", SECOND.batch))
    assert [step for step, _ in logged] == [*range(1, 34)]  # So that a long step shows that it is done.
    reported = [(step, metrics) for step, metrics in logged if metrics]
    assert fit.history == [{"step": step, "metrics": metrics} for step, metrics in reported]
    assert [step for step, _ in reported] == [10, 20, 30]
    assert all(set(metrics) == {"loss", "loss_second"} for _, metrics in reported)


def test_a_phase_ends_early_on_its_running_mean(tmp_path: Path) -> None:
    """One example again and again: its loss falls, and twenty steps must agree before the phase ends."""
    example = [_example(random.Random(1))] * 4
    conf = PhaseConf(max_steps=500, batch=4, lr=1e-2, decay=False, stop_loss=0.5)
    losses: list[float] = []
    fit = Fit(make_learner(_model()), tmp_path, 1000, 200, lambda step, metrics: None)
    update = fit._update
    fit._update = lambda c, e: losses.append(update(c, e)) or losses[-1]  # type: ignore[method-assign, func-returns-value]
    fit.run("one", conf, lambda step: example)
    assert 20 <= fit.step == len(losses) < 500
    assert sum(losses[-20:]) / 20 < 0.5
    assert fit.step == 20 or sum(losses[-21:-1]) / 20 >= 0.5
    fit.run("next", PhaseConf(3, 4, 1e-2, False, 1e9), lambda step: example)  # The mean starts anew.
    assert fit.step == len(losses) == losses.index(losses[-1]) + 1
    assert fit.finished == ["one", "next"]


def test_stop_loss_zero_never_ends_early(tmp_path: Path) -> None:
    fit = Fit(make_learner(_model()), tmp_path, 1000, 200, lambda step, metrics: None)
    fit.run("one", PhaseConf(30, 1, 1e-2, False, 0.0), lambda step: [Example((2,), (3,), (True,))])
    assert fit.step == 30


def test_a_phase_of_no_steps_is_passed_over(tmp_path: Path) -> None:
    fit = Fit(make_learner(_model()), tmp_path, 5, 200, lambda step, metrics: None)
    fit.run("none", PhaseConf(0, 1, 1e-2, True, 0.0), lambda step: [])
    assert (fit.step, fit.finished) == (0, ["none"])


def test_a_loss_that_is_no_number_is_an_error_and_is_not_kept(tmp_path: Path) -> None:
    model = _model()
    fit = Fit(make_learner(model), tmp_path, 1, 200, lambda step, metrics: None)
    fit.run("fine", PhaseConf(1, 1, 1e-2, False, 0.0), lambda step: [Example((2,), (3,), (True,))])
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(ValueError, match=r"the loss became nan at step 1\. Lower lr"):
        fit.run("broken", PhaseConf(3, 1, 1e-2, False, 0.0), lambda step: [Example((2,), (3,), (True,))])
    fresh = _model(1)
    Fit(make_learner(fresh), tmp_path, 1, 200, lambda step, metrics: None)
    assert all(bool(p.isfinite().all()) for p in fresh.parameters())


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=30), st.integers(1, 120))
def test_batches_are_a_partition_within_the_budget(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    examples = [Example((0,) * p, (i,) * r, (True,) * r) for i, (p, r) in enumerate(sizes)]
    batches = by_length(examples, max_tokens)
    assert sorted(e.response_ids[0] for batch in batches for e in batch) == list(range(len(examples)))
    for batch in batches:
        width = max(len(e.prompt_ids) + len(e.response_ids) for e in batch)
        assert len(batch) == 1 or len(batch) * width <= max_tokens


def _naive_loss(model: Any, example: Example) -> torch.Tensor:
    """One example, one token after the other, from the logits of the whole model."""
    ids = example.prompt_ids + example.response_ids
    loss = torch.zeros(())
    for i, own in enumerate(example.loss_mask):
        if own:
            position = len(example.prompt_ids) + i
            logits = model(input_ids=torch.tensor([ids[:position]])).logits[0, -1]
            loss = loss - logits.log_softmax(-1)[ids[position]]
    return loss


def test_the_loss_is_the_obvious_one() -> None:
    model, rng = _model(), random.Random(5)
    examples = [_example(rng) for _ in range(6)]
    found = supervised_loss(model, examples)
    expected = sum((_naive_loss(model, example) for example in examples), torch.zeros(()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    found.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected.backward()
    for ours, theirs in zip(gradients, (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_tokens_outside_the_mask_and_padding_have_no_gradient() -> None:
    """The inputs' gradient of a masked-out last token is zero, and a neighbour's length changes nothing."""
    model = _model()
    short = Example((2, 3), (4, 5, 6), (True, True, False))
    other = Example((2, 3), (4, 5, 7), (True, True, False))
    assert torch.equal(supervised_loss(model, [short]), supervised_loss(model, [other]))
    long = Example((9,) * 9, (8,) * 9, (False,) * 8 + (True,))
    both = supervised_loss(model, [short, long])
    torch.testing.assert_close(
        both, supervised_loss(model, [short]) + supervised_loss(model, [long]), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 10_000])
def test_the_update_does_not_depend_on_how_a_batch_is_spread(tmp_path: Path, max_tokens: int) -> None:
    """Up to the order of float sums: the loss is divided by the tokens of the whole step."""
    rng = random.Random(2)
    examples = [_example(rng) for _ in range(8)]
    models = []
    for folder, tokens in (("one", 10_000), ("many", max_tokens)):
        model = _model()
        fit = Fit(make_learner(model), tmp_path / folder, 100, tokens, lambda step, metrics: None)
        fit.run("p", PhaseConf(1, 8, 1e-2, False, 0.0), lambda step: examples)
        models.append((model, fit.recent))
    for ours, theirs in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        # Adam's first step is lr * sign: a gradient of about 0 may turn its sign with the order of the sum.
        assert float((ours - theirs).detach().abs().mean()) < 1e-5
