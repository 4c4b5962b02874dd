"""Losses against the golden values of their pages and against slow second implementations."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import tensor

from tasks.rl.experience import Experience
from tasks.rl.logprobs import importance_weights, k1, k3, ratios
from tasks.rl.losses import LossSum, Normalizer, aggregate
from tasks.rl.losses.entropy import EntropyBonus
from tasks.rl.losses.policy_clip import PolicyClip, clip_fraction, clipped
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.value_losses.clipped_value import ClippedValueLoss, value_loss
from tests.papers import column, golden

F64 = torch.float64
INF = math.inf
many = settings(max_examples=150)
logs = st.floats(-6, 0)
numbers = st.floats(-3, 3).map(lambda x: round(x, 9))  # no products that vanish
OWN = tensor([[True, True, False, False, True, True]])
OLD = tensor([[-1, -0.5, -2, -1.5, -0.7, -0.2]], dtype=F64)
REF = tensor([[-1.2, -0.4, -1, -3, -0.7, -0.5]], dtype=F64)
NEW = tensor([[-0.7, -0.5, -2, -1.5, -0.9, -0.15]], dtype=F64)
ADVANTAGES = tensor([[1, 1, 1, 1, -1, -1]], dtype=F64)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


@st.composite
def batches(draw, *elements, max_rows=5, max_tokens=7):
    """Float64 tensors [B, T], one per strategy, and a mask [B, T]."""
    shape = draw(st.integers(1, max_rows)), draw(st.integers(1, max_tokens))
    size = shape[0] * shape[1]
    made = [tensor(draw(st.lists(e, min_size=size, max_size=size)), dtype=F64).reshape(shape) for e in elements]
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return *made, tensor(mask).reshape(shape)


def each(*tensors):
    """The aligned entries of several [B, T] tensors, as Python values."""
    return zip(*(t.flatten().tolist() for t in tensors), strict=True)


# KL ---------------------------------------------------------------------------------------------------------------


def test_kl_golden():
    expected = column("grpo", "KL estimates", "estimate", "values")
    close(k1(OLD, REF, OWN), [expected["k1, generated tokens"]])
    everywhere = tensor([expected["k3, all tokens"]], dtype=F64)
    close(k3(OLD, REF, torch.ones_like(OWN)), everywhere.tolist())
    close(k3(OLD, REF, OWN), torch.where(OWN, everywhere, 0.0).tolist())
    close(aggregate(k3(OLD, REF, OWN), OWN, "token_mean"), *expected["k3, mean over generated tokens"])


@many
@given(batches(logs, logs))
def test_kl_agrees_with_the_slow_ones(batch):
    new, ref, mask = batch
    for found, a, b, mine in each(k1(new, ref, mask), new, ref, mask):
        assert found == (a - b if mine else 0.0)
    for found, a, b, mine in each(k3(new, ref, mask), new, ref, mask):
        expected = min(max(math.exp(b - a) - (b - a) - 1, -10.0), 10.0) if mine else 0.0
        assert found == pytest.approx(expected, abs=1e-9)
        assert found >= -1e-12


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("far", [-INF, -1e4, -1000.0, -90.0, -20.0, 20.0, 90.0, 1e4])
def test_k3_far_from_the_reference_is_clamped_and_has_no_gradient(far, dtype):
    new = tensor([[far, -1.0]], dtype=dtype, requires_grad=True)
    found = k3(new, tensor([[0.0, -1.5]], dtype=dtype), tensor([[True, True]]))
    found.sum().backward()
    assert found[0, 0].item() == 10.0
    close(new.grad, [[0.0, 1 - math.exp(-0.5)]], 1e-6)  # d/dx of exp(r - x) - (r - x) - 1


# Ratio and clipping -----------------------------------------------------------------------------------------------


def test_clipped_golden():
    rows = golden("ppo", "Clipped loss")
    expected = {(row["quantity"], row["clip"]): row["values"] for row in rows}
    ratio = ratios(NEW, OLD, torch.ones_like(OWN))
    close(ratio, [expected["ratio", ""]])

    per_token = clipped(ratio, ADVANTAGES, 0.2, 0.2)
    (narrow,) = expected["mean over generated tokens", "0.2/0.2"]
    close(per_token, [expected["loss", "0.2/0.2"]])
    close(aggregate(per_token, OWN, "token_mean"), narrow)
    close(
        aggregate(per_token, torch.ones_like(OWN), "token_mean"),
        *expected["mean over all tokens, the mistake", "0.2/0.2"],
    )
    close(aggregate(clipped(ratios(NEW, OLD, OWN), ADVANTAGES, 0.2, 0.2), OWN, "token_mean"), narrow)

    wide = clipped(ratio, ADVANTAGES, 0.2, 0.28)
    close(wide[0, 0], -1.28)
    close(aggregate(wide, OWN, "token_mean"), *expected["mean over generated tokens", "0.2/0.28"])


def slow_clipped(new, old, advantage, low, high):
    """Loss of one token and its derivative by the new logprob, case by case."""
    ratio = math.exp(new - old)
    if advantage >= 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    return -advantage * ratio, -advantage * ratio


bounds = st.floats(0.05, 0.5)


@many
@given(batches(logs, logs, numbers), bounds, bounds)
def test_clipped_loss_and_gradient_agree_with_the_slow_ones(batch, low, high):
    new, old, advantages, mask = batch
    for edge in (1 - low, 1 + high):  # On the kink itself the derivative is not defined.
        assume(((new - old).exp() - edge).abs().min() > 1e-9)
    new.requires_grad_()
    per_token = clipped(ratios(new, old, mask), advantages, low, high)
    aggregate(per_token, mask, "token_mean").backward()
    share = 1 / max(int(mask.sum()), 1)
    for loss, grad, a, b, advantage, mine in each(per_token.detach(), new.grad, new.detach(), old, advantages, mask):
        if not mine:
            assert grad == 0.0
            continue
        value, slope = slow_clipped(a, b, advantage, low, high)
        assert loss == pytest.approx(value, abs=1e-9)
        assert grad == pytest.approx(slope * share, abs=1e-9)


@many
@given(batches(logs, logs, numbers.filter(bool)), bounds, bounds)
def test_clip_fraction_counts_the_generated_tokens_without_gradient(batch, low, high):
    new, old, advantages, mask = batch
    for edge in (1 - low, 1 + high):
        assume(((new - old).exp() - edge).abs().min() > 1e-9)
    slopes = [slow_clipped(a, b, c, low, high)[1] for a, b, c, mine in each(new, old, advantages, mask) if mine]
    expected = sum(slope == 0 for slope in slopes) / max(len(slopes), 1)
    found = clip_fraction(ratios(new, old, mask), advantages, mask, low, high)
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
@many
@given(st.lists(st.floats(-50, 0), min_size=1, max_size=9))
def test_an_unmoved_policy_has_ratio_exactly_one_and_the_plain_gradient(dtype, values):
    new = tensor([values], dtype=dtype, requires_grad=True)
    mask = torch.ones(1, len(values), dtype=torch.bool)
    ratio = ratios(new, new.detach().clone(), mask)
    assert (ratio == 1).all()
    advantages = torch.full_like(ratio, 2.0)
    assert clip_fraction(ratio, advantages, mask, 0.2, 0.2).item() == 0.0
    clipped(ratio, advantages, 0.2, 0.2).sum().backward()
    assert (new.grad == -2.0).all()


@pytest.mark.parametrize("difference", [50.0, 100.0, 1e4])
def test_a_generated_token_far_from_the_old_policy_gives_finite_numbers(difference):
    # float32: exp(89) is inf, and the gradient of a clipped inf would be nan for the whole batch.
    new = tensor([[difference, difference, -difference, -difference]], requires_grad=True)
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    per_token = clipped(ratios(new, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)), advantages, 0.2, 0.2)
    per_token.sum().backward()
    assert torch.isfinite(per_token).all()
    assert torch.isfinite(new.grad).all()
    assert per_token[0, 0].item() == pytest.approx(-1.2)
    assert new.grad[0, 0].item() == new.grad[0, 3].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    ("new_value", "old_value"),
    [(-INF, -1.0), (-1.0, -INF), (-INF, -INF), (1e4, 0.0), (0.0, 1e4), (math.nan, -1.0), (-1.0, math.nan), (INF, -INF)],
)
def test_masked_tokens_get_no_gradient_whatever_stands_there(new_value, old_value, dtype):
    mask = tensor([[True, False, True]])
    new = tensor([[-1.0, new_value, -0.5]], dtype=dtype, requires_grad=True)
    old = tensor([[-1.1, old_value, -0.5]], dtype=dtype)
    advantages = tensor([[1.0, math.nan, -1.0]], dtype=dtype)
    ratio = ratios(new, old, mask)
    weights = importance_weights(old, new.detach(), mask, 2.0)
    loss = aggregate(clipped(ratio, advantages, 0.2, 0.2) * weights, mask, "token_mean")
    loss = loss + 0.1 * aggregate(k3(new, old, mask), mask, "seq_mean")
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert new.grad[0, 1].item() == 0.0
    assert (new.grad[mask] != 0).all()
    assert torch.isfinite(k1(old, new.detach(), mask)).all()
    assert torch.isfinite(clip_fraction(ratio.detach(), advantages, mask, 0.2, 0.2))


# Aggregation ------------------------------------------------------------------------------------------------------


def ragged_golden():
    per_token = tensor([[1, 1, 9, 9, 9, 9], [-0.5] * 6], dtype=F64)
    return per_token, tensor([[True, True, False, False, False, False], [True] * 6])


def test_aggregation_golden():
    per_token, mask = ragged_golden()
    for row in golden("grpo", "Aggregation"):
        close(aggregate(per_token, mask, row["aggregation"]), row["value"])


def slow_aggregate(per_token, mask, how):
    rows = [
        [v for v, mine in zip(r, m, strict=True) if mine]
        for r, m in zip(per_token.tolist(), mask.tolist(), strict=True)
    ]
    rows = [r for r in rows if r]
    if not rows:
        return 0.0
    if how == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(r) / len(r) for r in rows) / len(rows)


kinds = st.sampled_from(["token_mean", "seq_mean"])


@many
@given(batches(numbers), kinds)
def test_aggregation_agrees_with_the_slow_one(batch, how):
    per_token, mask = batch
    assert aggregate(per_token, mask, how).item() == pytest.approx(slow_aggregate(per_token, mask, how), abs=1e-9)


@many
@given(batches(numbers), kinds, st.data())
def test_micro_batches_add_up_to_the_whole(batch, how, data):
    per_token, mask = batch
    cuts = data.draw(st.lists(st.booleans(), min_size=len(mask) - 1, max_size=len(mask) - 1))
    edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(mask)]
    whole = per_token.clone().requires_grad_()
    aggregate(whole, mask, how).backward()
    parts, total = per_token.clone().requires_grad_(), 0.0
    for start, stop in itertools.pairwise(edges):
        own = mask[start:stop]
        width = int(own.any(0).nonzero().max()) + 1 if own.any() else 1  # Padded to the micro-batch's own width.
        loss = aggregate(parts[start:stop, :width], own[:, :width], how, Normalizer.of(mask))
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(aggregate(per_token, mask, how).item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-12)


def test_equal_weights_for_micro_batches_would_be_wrong():
    # Why the Normalizer exists: the mean of the micro-batches' own token means is 0.25, the mini-batch's is -0.125.
    per_token, mask = ragged_golden()
    naive = sum(aggregate(per_token[b : b + 1], mask[b : b + 1], "token_mean") for b in range(2)) / 2
    exact = sum(aggregate(per_token[b : b + 1], mask[b : b + 1], "token_mean", Normalizer.of(mask)) for b in range(2))
    close(naive, 0.25)
    close(exact, -0.125)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean"])
def test_all_zero_masks_give_zero_not_nan(how):
    per_token = tensor([[math.nan, INF]], dtype=F64, requires_grad=True)
    loss = aggregate(per_token, tensor([[False, False]]), how)
    loss.backward()
    assert loss.item() == 0.0
    assert per_token.grad.tolist() == [[0.0, 0.0]]
    assert clip_fraction(per_token, per_token, tensor([[False, False]]), 0.2, 0.2).item() == 0.0


def test_a_row_without_generated_tokens_changes_no_mean():
    per_token, mask = ragged_golden()
    more = torch.cat([per_token, torch.full((1, 6), 4.0, dtype=F64)])
    wide = torch.cat([mask, torch.zeros(1, 6, dtype=torch.bool)])
    close(aggregate(more, wide, "token_mean"), -0.125)
    close(aggregate(more, wide, "seq_mean"), 0.25)
    assert Normalizer.of(wide) == Normalizer(tokens=8, sequences=2)


# The terms as the trainer calls them ----------------------------------------------------------------------------------


def slow_mean(per_token, mask, how, weights, group_tokens=None):
    """`question_mean` for two questions; `group_tokens` in place of the samples' own lengths."""
    rows = [
        weight * sum(v for v, mine in zip(r, m, strict=True) if mine)
        for r, m, weight in zip(per_token, mask.tolist(), weights, strict=True)
    ]
    sizes = [sum(m) for m in mask.tolist()]
    if how == "token_mean":
        return sum(rows) / max(sum(sizes), 1)
    means = sum(r / max(n, 1) for r, n in zip(rows, group_tokens or sizes, strict=True))
    return means / (2 if how == "question_mean" else max(sum(n > 0 for n in sizes), 1))


@st.composite
def step_batches(draw):
    """A mini-batch of two questions with different weights, and its current logprobs."""
    new, old, sampler, ref, advantages, mask = draw(batches(logs, logs, logs, logs, numbers, max_rows=5))
    count, width = new.shape
    weights = draw(st.lists(st.sampled_from([0.2, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    counts = draw(st.lists(st.integers(8, 12), min_size=count, max_size=count))
    everything = torch.ones(count, width, dtype=torch.bool)
    batch = Experience(
        torch.ones(count, width, dtype=torch.long), torch.full((count,), width), everything, mask,
        torch.zeros_like(new), ("g",) * count, sampler, old, ref, None, advantages, None,
        tensor(weights, dtype=F64), ("q",) * count, tensor(counts),
    )  # fmt: skip
    return batch, new, weights, counts


def value_of(part, batch, logprobs):
    """The term of a mini-batch of two questions."""
    whole = Normalizer.of(batch.loss_mask)
    return part(batch, logprobs, torch.zeros_like(logprobs), replace(whole, questions=2))[0].item()


@many
@given(step_batches(), bounds, bounds, st.sampled_from(["token_mean", "seq_mean", "question_mean"]))
def test_the_clipped_term_agrees_with_the_slow_one(drawn, low, high, how):
    """Both bounds, the correction for the generator, the samples' weights and the mean."""
    batch, new, weights, _ = drawn
    for cap in (2.0, None):
        terms = [
            [
                slow_clipped(a, b, c, low, high)[0] * (1.0 if cap is None else min(math.exp(b - s), cap))
                for a, b, s, c in zip(*rows, strict=True)
            ]
            for rows in zip(
                *(t.tolist() for t in (new, batch.old_logprobs, batch.sampler_logprobs, batch.advantages)), strict=True
            )
        ]
        expected = slow_mean(terms, batch.loss_mask, how, weights)
        assert value_of(PolicyClip(low, high, "token", how, cap), batch, new) == pytest.approx(expected, abs=1e-9)


@many
@given(step_batches(), bounds, bounds)
def test_the_clipped_term_of_trajectories_agrees_with_the_slow_one(drawn, low, high):
    """One ratio, one weight and the mean advantage of a sample's own trained tokens."""
    batch, new, weights, _ = drawn
    total = 0.0
    for i, weight in enumerate(weights):
        own = batch.loss_mask[i]
        if own.any():
            a, b, s, c = (
                t[i][own].mean().item() for t in (new, batch.old_logprobs, batch.sampler_logprobs, batch.advantages)
            )
            total += weight * slow_clipped(a, b, c, low, high)[0] * min(math.exp(b - s), 2.0)
    expected = total / max(int(batch.loss_mask.any(-1).sum()), 1)
    assert value_of(PolicyClip(low, high, "sequence", "seq_mean"), batch, new) == pytest.approx(expected, abs=1e-9)


@many
@given(step_batches(), st.sampled_from(["token_mean", "seq_mean", "question_mean"]))
def test_the_kl_term_agrees_with_the_slow_one(drawn, how):
    """Samples have their weights, except in a mean over the tokens of a group, which no weight may count again."""
    batch, new, weights, counts = drawn
    terms = [
        [min(max(math.exp(r - a) - (r - a) - 1, -10.0), 10.0) for a, r in zip(*rows, strict=True)]
        for rows in zip(new.tolist(), batch.ref_logprobs.tolist(), strict=True)
    ]
    by_group = how == "question_mean"
    shares = [1.0] * len(weights) if by_group else weights
    expected = 0.3 * slow_mean(terms, batch.loss_mask, how, shares, counts if by_group else None)
    assert value_of(ReferenceKl(0.3, how), batch, new) == pytest.approx(expected, abs=1e-9)


def test_metrics_are_distances_from_the_policy_that_played_and_from_the_reference():
    """`approx_kl` is estimated on tokens of the old policy, `kl` on those of the new one."""
    whole = torch.ones(1, 6, dtype=torch.long)
    batch = Experience(
        whole, tensor([6]), whole.bool(), OWN, torch.zeros(1, 6), ("g",), OLD, OLD, REF, None, ADVANTAGES,
    )  # fmt: skip
    _, metrics = LossSum((PolicyClip(0.2, 0.2),))(batch, NEW, torch.ones_like(NEW), Normalizer.of(OWN))
    mine = [i for i, own in enumerate(OWN[0].tolist()) if own]
    played = [NEW[0, i].item() - OLD[0, i].item() for i in mine]
    apart = [REF[0, i].item() - NEW[0, i].item() for i in mine]
    close(metrics["approx_kl"], sum(math.exp(d) - d - 1 for d in played) / len(mine))
    close(metrics["kl"], sum(math.exp(d) - d - 1 for d in apart) / len(mine))
    close(metrics["ratio_mean"], sum(map(math.exp, played)) / len(mine))
    close(metrics["entropy"], 1.0)


# Value loss and importance weights --------------------------------------------------------------------------------


def test_value_loss_golden():
    values, old, returns = (tensor([v], dtype=F64) for v in ([0.25, 0.9], [0.2, 0.3], [1.0, 1.0]))
    per_token = value_loss(values, old, returns, 0.5)
    expected = column("ppo", "Value loss", "quantity", "values")
    close(per_token, [expected["loss"]])
    close(aggregate(per_token, tensor([[True, True]]), "token_mean"), *expected["mean"])


@many
@given(batches(numbers, numbers, numbers), st.floats(0.05, 2))
def test_value_loss_agrees_with_the_slow_one(batch, clip):
    values, old, returns, _ = batch
    for found, v, before, target in each(value_loss(values, old, returns, clip), values, old, returns):
        near = min(max(v, before - clip), before + clip)
        assert found == pytest.approx(0.5 * max((v - target) ** 2, (near - target) ** 2), abs=1e-9)


@many
@given(batches(logs, logs), st.floats(1, 4))
def test_importance_weights_agree_with_the_slow_ones(batch, cap):
    old, sampler, mask = batch
    old.requires_grad_()
    found = importance_weights(old, sampler, mask, cap)
    assert not found.requires_grad
    for weight, a, b, mine in each(found, old.detach(), sampler, mask):
        assert weight == pytest.approx(min(math.exp(a - b), cap) if mine else 1.0)


@many
@given(batches(logs, logs))
def test_importance_weights_can_be_switched_off(batch):
    old, sampler, mask = batch
    assert (importance_weights(old, sampler, mask, None) == 1).all()
    assert (importance_weights(old, old, mask, 2.0) == 1).all()


# Bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "numbers", "message"),
    [
        (PolicyClip, {"low": 1.4, "high": 0.2}, "low=1.4: expected a distance from 1"),
        (PolicyClip, {"low": -0.1, "high": 0.2}, "low=-0.1"),
        (PolicyClip, {"low": 0.2, "high": -0.2}, "high=-0.2"),
        (PolicyClip, {"low": 0.2, "high": 0.2, "importance_cap": 0.5}, "importance_cap=0.5: expected null or"),
        (PolicyClip, {"low": 0.2, "high": 0.2, "ratio": "sequence"}, "aggregation='token_mean': expected seq_mean"),
        (ReferenceKl, {"coefficient": -1.0}, "coefficient=-1.0"),
        (ReferenceKl, {"coefficient": 0.0}, "coefficient=0.0: expected more than 0; write null in place of the term"),
        (EntropyBonus, {"coefficient": 0.0}, "coefficient=0.0: expected more than 0; write null in place of the term"),
        (ClippedValueLoss, {"clip": 0.0}, "clip=0.0: expected a positive distance"),
    ],
)
def test_numbers_out_of_bounds(part, numbers, message):
    with pytest.raises(ValueError, match=message):
        part(**numbers)
