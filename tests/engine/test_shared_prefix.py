"""Samples that share a prefix, read in one row, against the same samples read row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.engine import Objective
from tasks.engine.plain import PlainCritic, PlainPolicy
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import (
    Experience,
    collate,
    minibatches,
    prefix_groups,
    shared_microbatches,
    shared_minibatches,
    shared_prefixes,
)
from tasks.rl.losses import LossSum, Normalizer
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.shared_prefix import attention_to_prefixes, hidden_states, require_supported
from tasks.train.update import Learner
from tasks.types import Sample, Scores
from tests.tiny import make_method, make_model, make_policy, make_tokenizer, optimizer, train_conf

Tree = tuple[int, list[int]]
"""Length of a prefix, and of its samples."""
TREES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=5)), min_size=1, max_size=4
)
TEXTS = st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=9), min_size=1, max_size=8)


def experience_of(trees: list[Tree], order: list[int] | None = None) -> Experience:
    """Samples of these trees, every third own token an observation; old logprobs differ from the policy's."""
    samples: list[Sample] = []
    for number, (prefix, owns) in enumerate(trees):
        for i, own in enumerate(owns):
            ids = tuple((31 * number + 17 * i + 7 * t) % 200 for t in range(own))
            context = tuple((13 * number + 5 * t) % 200 for t in range(prefix))
            trained = tuple(t % 3 != 2 for t in range(own))
            logprobs = tuple(-5.0 - 0.1 * i * t for t in range(own))
            samples.append(Sample(f"q{number}", f"g{number}", context, ids, trained, logprobs))
    if order is not None:
        samples = [samples[i] for i in order]
    experience = collate(samples, [Scores(0.0, ())] * len(samples))
    advantages = torch.linspace(-1, 1, len(experience))[:, None] * experience.loss_mask
    return replace(experience, old_logprobs=experience.sampler_logprobs, advantages=advantages)


def model_of(**changes: Any) -> Any:
    """Two layers, two heads of queries for each head of keys, in double precision."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, **changes,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:  # That of transformers computes in single precision.
                setattr(module, name, torch.nn.RMSNorm(32, config.rms_norm_eps, dtype=torch.double))
    return model


def row_by_row(decoder: Any, batch: Experience) -> list[Tensor]:
    """The hidden states of every sample, unpadded."""
    return [
        decoder(input_ids=batch.ids[row : row + 1, : length - 1], use_cache=False).last_hidden_state[0]
        for row, length in enumerate(batch.lengths.tolist())
    ]


MODEL = model_of()


def alike(texts: list[list[int]]) -> Experience:
    """Samples of these texts, whose first tokens are their prompts; all that follows was written."""
    samples = [
        Sample(
            f"q{text[0]}",
            f"g{text[0]}",
            (text[0],),
            tuple(text[1:]),
            (True,) * (len(text) - 1),
            (-5.0,) * (len(text) - 1),
        )
        for text in texts
    ]
    experience = collate(samples, [Scores(0.0, ())] * len(samples))
    advantages = torch.linspace(-1, 1, len(experience))[:, None] * experience.loss_mask
    return replace(experience, old_logprobs=experience.sampler_logprobs, advantages=advantages)


def beginnings(texts: list[list[int]]) -> int:
    """How many different beginnings these texts have: the nodes of their tree."""
    return len({tuple(text[:size]) for text in texts for size in range(1, len(text) + 1)})


@settings(max_examples=30, deadline=None)
@given(TREES, st.randoms(use_true_random=False), st.booleans())
def test_hidden_states_and_gradients_are_those_of_separate_rows(trees: list[Tree], random: Any, longest: bool) -> None:
    order = list(range(sum(len(owns) for _, owns in trees)))
    random.shuffle(order)
    _same_as_separate(experience_of(trees, order), longest)


@settings(max_examples=20, deadline=None)
@given(TEXTS)
def test_every_common_beginning_is_read_once(texts: list[list[int]]) -> None:
    assert _same_as_separate(alike(texts), longest=True) == beginnings([text[:-1] for text in texts])


@given(TEXTS, st.integers(1, 30))
def test_micro_batches_of_common_beginnings_keep_to_the_budget(texts: list[list[int]], budget: int) -> None:
    plan = shared_microbatches(alike(texts), range(len(texts)), budget, longest=True)
    assert sorted(row for rows in plan for row in rows) == list(range(len(texts)))
    for rows in plan:
        assert beginnings([texts[row] for row in rows]) <= budget or len(rows) == 1


def _same_as_separate(batch: Experience, longest: bool) -> int:
    """Compare hidden states and gradients with those of separate rows; the number of tokens that were read."""
    decoder, read = MODEL.get_decoder(), []
    weights = [torch.randn(n - 1, 32, dtype=torch.double) for n in batch.lengths.tolist()]

    separate = row_by_row(decoder, batch)
    MODEL.zero_grad()
    sum((states * weight).sum() for states, weight in zip(separate, weights, strict=True)).backward()  # type: ignore[union-attr]
    expected = {name: p.grad.clone() for name, p in decoder.named_parameters()}

    MODEL.zero_grad()
    handle = decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with handle, attention_to_prefixes(decoder):
        states = hidden_states(decoder, batch.ids, batch.lengths, None if longest else shared_prefixes(batch))
        sum((states[row, : len(weight)] * weight).sum() for row, weight in enumerate(weights)).backward()  # type: ignore[union-attr]

    for row, wanted in enumerate(separate):
        torch.testing.assert_close(states[row, : len(wanted)], wanted, rtol=0, atol=1e-10)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9)
    (size,) = read
    return int(size)


def test_a_prefix_is_read_once_and_nothing_is_padded() -> None:
    batch, read = experience_of([(9, [7, 3, 1]), (4, [5])]), []
    decoder = MODEL.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with handle, attention_to_prefixes(decoder):
        hidden_states(decoder, batch.ids, batch.lengths, shared_prefixes(batch))
    assert read == [9 + 6 + 2 + 0 + 4 + 4]


def objective() -> Any:
    return Objective(LossSum((PolicyClip(0.2, 0.2),)), Normalizer(9, 5))


def updated(policy: PlainPolicy, batch: Experience) -> tuple[dict[str, Tensor], Any]:
    """The gradients of one micro-batch, and its metrics."""
    metrics = policy.accumulate(batch, range(len(batch)), objective())
    return {name: p.grad.clone() for name, p in policy.trained.items() if p.grad is not None}, metrics


@pytest.mark.parametrize("options", [{}, {"keep_activations": False}, {"rank": 4}])
@pytest.mark.parametrize("share", [True, "longest"])
def test_an_update_is_that_of_separate_rows(share: Any, options: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    batch = (
        experience_of([(9, [7, 3, 1]), (4, [5, 2])])
        if share is True
        else alike([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9], [1, 2, 3, 4, 5], [8, 2, 3]])
    )
    plain = make_policy(make_model(tokenizer), tokenizer, **options)
    shared = make_policy(make_model(tokenizer), tokenizer, share_prefixes=share, **options)

    plan = [list(range(len(batch)))]
    for of_reference in (False, True):
        found_logprobs, expected = (policy.logprobs(batch, plan, of_reference) for policy in (shared, plain))
        torch.testing.assert_close(found_logprobs, expected, rtol=0, atol=2e-6)
    (wanted, wanted_metrics), (found, metrics) = updated(plain, batch), updated(shared, batch)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(wanted_metrics, abs=1e-5)
    assert any(gradient.abs().max() > 1e-4 for gradient in wanted.values())
    assert shared.causal_lm.config._attn_implementation == "sdpa"  # A generator plays with the same model.


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of an update in float64, also where the engine asks for single precision by `float()`."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float32)


def samples_of_steps() -> tuple[list[Sample], list[Scores]]:
    """Two questions of two and one steps with three candidates each, of different lengths, and their rewards."""
    samples: list[Sample] = []
    scores: list[Scores] = []
    for number, step in ((0, 0), (0, 1), (1, 0)):
        context = tuple((13 * number + 5 * t) % 200 for t in range(6 + 5 * step))
        for i in range(3):
            ids = tuple((31 * number + 11 * step + 17 * i + 7 * t) % 200 for t in range(2 + 3 * i))
            logprobs = tuple(-5.0 - 0.1 * i for _ in ids)
            group = f"q{number}/step {step + 1}"
            samples.append(Sample(f"q{number}", group, context, ids, (True,) * len(ids), logprobs, 1 / 3))
            scores.append(Scores(0.0, ((len(ids) - 1, (1.0, -2.0, 0.5)[(i + step) % 3]),)))
    return samples, scores


def learned(is_ppo: bool, **changes: Any) -> tuple[list[dict[str, Tensor]], dict[str, float], Experience]:
    """The gradients of every update of a step of training, its metrics and what it learned from."""
    conf = train_conf(
        minibatches=2, epochs=2, minibatches_of="questions", policy=optimizer(max_grad_norm=1e9, lr=1e-3), **changes
    )
    tokenizer, model = make_tokenizer(), model_of()
    critic = PlainCritic(model, conf.policy, "float32", share_prefixes=conf.share_prefixes) if is_ppo else None
    policy = make_policy(model, tokenizer, conf=conf.policy, share_prefixes=conf.share_prefixes)
    found: list[dict[str, Tensor]] = []
    for trainee in (policy, critic) if critic is not None else (policy,):
        trained = trainee.trained
        trainee.optimizer.register_step_pre_hook(
            lambda *_, of=trained: found.append({n: p.grad.clone() for n, p in of.items() if p.grad is not None})
        )
    terms = (PolicyClip(0.2, 0.2, "token", "question_mean"), ReferenceKl(0.05, "question_mean"))
    advantage = TokenGae(1.0, 0.9, 0.01) if is_ppo else GroupAdvantage(1e-6, "population")
    method = replace(make_method("ppo" if is_ppo else "grpo", tokenizer), loss=LossSum(terms), advantage=advantage)
    experience, metrics = Learner(conf, method, policy, critic, True, 0).learn(*samples_of_steps(), 1)
    return found, metrics, experience


@pytest.mark.parametrize("is_ppo", [False, True])
@pytest.mark.parametrize("share", [True, "longest"])
def test_a_step_of_training_has_the_loss_and_the_gradients_of_separate_rows(
    double_precision: None, is_ppo: bool, share: Any
) -> None:
    """Old and reference log-probabilities, values, advantages and four updates with their steps, in float64."""
    (wanted, wanted_metrics, alone), (found, metrics, together) = (
        learned(is_ppo, share_prefixes=one) for one in (False, share)
    )
    assert len(found) == len(wanted) == (8 if is_ppo else 4)
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        assert max(float(gradient.abs().max()) for gradient in other.values()) > 1e-3
        for name, gradient in other.items():
            assert gradient.dtype == torch.double
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=1e-9)
    assert metrics.keys() == wanted_metrics.keys()
    assert metrics == pytest.approx(wanted_metrics, rel=0, abs=1e-9)
    assert metrics["loss"] != 0
    for name in ("old_logprobs", "ref_logprobs", "advantages", *(("values", "returns") if is_ppo else ())):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), rtol=0, atol=1e-9)


def test_the_critic_reads_a_prefix_once_too() -> None:
    tokenizer = make_tokenizer()
    batch, plan = experience_of([(9, [7, 3, 1]), (4, [5, 2])]), [[0, 1, 2, 3, 4]]
    plain, shared = (
        PlainCritic(make_model(tokenizer), optimizer(), "float32", share_prefixes=share) for share in (False, True)
    )
    for critic in (plain, shared):
        torch.nn.init.ones_(critic.module["head"].weight)  # type: ignore[index]
    torch.testing.assert_close(shared.values(batch, plan), plain.values(batch, plan), rtol=0, atol=2e-5)


def test_an_architecture_that_reads_the_place_in_a_row_is_refused() -> None:
    decoder = model_of().get_decoder()
    decoder.norm.register_forward_hook(lambda module, args, output: output + torch.arange(output.shape[1])[:, None])
    with pytest.raises(ValueError, match=r"Qwen2Model: its hidden states change .* share_prefixes .* to false"):
        require_supported(decoder)
    require_supported(MODEL.get_decoder())


def test_an_architecture_that_hands_nothing_on_to_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model_of().get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda segments=None, **words: forward(**words))
    with pytest.raises(ValueError, match=r"Qwen2Model: it cannot read packed samples: .* share_prefixes .* to false"):
        require_supported(decoder)
    monkeypatch.setattr(decoder, "forward", lambda input_ids, position_ids=None, use_cache=False: forward(input_ids))
    with pytest.raises(ValueError, match=r"cannot read packed samples: .*unexpected keyword argument"):
        require_supported(decoder)


@pytest.mark.parametrize("window", [2, 4096])
def test_a_window_is_refused_however_wide_it_is(window: int) -> None:
    model = model_of(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    with pytest.raises(
        ValueError, match=rf"Qwen2Attention: found sliding_window={window}, .* share_prefixes .* to false"
    ):
        require_supported(model.get_decoder())


@given(TREES, st.integers(1, 5), st.integers(1, 40))
def test_samples_of_a_prefix_stay_together_within_the_token_budget(trees: list[Tree], count: int, budget: int) -> None:
    experience = experience_of(trees)
    groups = prefix_groups(experience)
    plan = shared_minibatches(experience, count, budget, "seed")
    rows = [[row for batch in minibatch for row in batch] for minibatch in plan]
    assert sorted(row for part in rows for row in part) == list(range(len(experience)))
    assert [sorted(part) for part in rows] == [
        sorted(row for number in part for row in groups[number]) for part in minibatches(len(groups), count, "seed")
    ]

    prefixes, lengths = experience.prefix_lengths.tolist(), experience.lengths.tolist()
    for minibatch in plan:
        for batch in minibatch:
            heads = {i: prefixes[group[0]] for i, group in enumerate(groups) if set(group) & set(batch)}
            size = sum(heads.values()) + sum(lengths[row] - prefixes[row] for row in batch)
            assert size <= budget or len(batch) == 1
        assert all(minibatch)
