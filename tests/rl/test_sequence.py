"""One ratio a trajectory: golden values, plain loops, autograd of the naive formula, masks, batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import Experience, collate
from tasks.rl.logprobs import ratios, sequence_ratios
from tasks.rl.losses import LossSum, Normalizer, aggregate
from tasks.rl.samples import whole_trajectories
from tasks.types import Scores, Trajectory
from tests.papers import clip_range, column, golden
from tests.tiny import make_loss

F64 = torch.float64
many = settings(max_examples=150)
EXAMPLE = tensor([[0.1, -0.05, 0.2, 2.0, 0.0, 0.0]], dtype=F64)
EXAMPLE_MASK = tensor([[True, True, True, False, True, True]])
REWARDS = (1.0, 0.0, 1.0, 0.0)
MEANS = ([0.05], [-0.02], [0.30], [-0.30])
TOKENS = ([0.05, 0.05], [-0.02] * 4, [0.9, 0.0, 0.0], [-0.3])
RATIOS = column("dspo", "Ratio", "quantity", "values")


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


# Golden ratio ---------------------------------------------------------------------------------------------------------


def test_golden_ratio() -> None:
    old = torch.full_like(EXAMPLE, -1.0)
    assert sequence_ratios(old + EXAMPLE, old, EXAMPLE_MASK).tolist() == near(RATIOS["ratio of the trajectory"])
    token = ratios(old + EXAMPLE, old, torch.ones_like(EXAMPLE_MASK))
    assert token[0].tolist() == near(RATIOS["token ratios"])


def test_neither_mask_nor_length_is_forgotten() -> None:
    """The numbers of the two mistakes, computed here, and that ours is neither."""
    old = torch.full_like(EXAMPLE, -1.0)
    found = sequence_ratios(old + EXAMPLE, old, EXAMPLE_MASK).item()
    mask_forgotten = EXAMPLE.mean().exp().item()
    no_length = EXAMPLE[EXAMPLE_MASK].sum().exp().item()
    assert ([mask_forgotten], [no_length]) == (near(RATIOS["mask forgotten"]), near(RATIOS["length forgotten"]))
    assert min(abs(found - mask_forgotten), abs(found - no_length)) > 0.2


# Experience made of log-ratios ----------------------------------------------------------------------------------------


def experience(
    log_ratios: Sequence[Sequence[float]], rewards: Sequence[float] = REWARDS, deviation: Any = "sample",
    masks: Sequence[Sequence[bool]] | None = None, advantages: Sequence[float] | None = None,
) -> tuple[Experience, Tensor]:  # fmt: skip
    """A batch in float64 and its current logprobs: a prompt of one token, old logprobs -1."""
    masks = masks or [[True] * len(row) for row in log_ratios]
    rows = [
        Trajectory("q", "g", (7,), (1,) * len(row), tuple(mask), (-1.0,) * len(row), (), "open")
        for row, mask in zip(log_ratios, masks, strict=True)
    ]
    scored = [Scores(r, ((len(row) - 1, r),)) for r, row in zip(rewards, log_ratios, strict=True)]
    batch = collate(whole_trajectories(rows), scored)
    batch = replace(
        batch, rewards=batch.rewards.double(), old_logprobs=torch.full(batch.ids.shape, -1.0, dtype=F64),
        sampler_logprobs=torch.full(batch.ids.shape, -1.0, dtype=F64),
        ref_logprobs=torch.full(batch.ids.shape, -1.25, dtype=F64),
    )  # fmt: skip
    scores = batch.rewards.sum(-1)
    if advantages is None:
        own = (scores - scores.mean()) / (scores.std(unbiased=deviation == "sample") + 1e-6)
    else:
        own = tensor(advantages, dtype=F64)
    batch = replace(batch, advantages=own[:, None] * batch.loss_mask)
    moved = torch.full(batch.ids.shape, -1.0, dtype=F64)
    for i, row in enumerate(log_ratios):
        moved[i, 1 : 1 + len(row)] += tensor(row, dtype=F64)
    return batch, moved.requires_grad_()


def by_sequence(low: float, high: float, **terms: Any) -> LossSum:
    return make_loss(low, high, "seq_mean", ratio="sequence", **terms)


def run(part: LossSum, batch: Experience, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return part(batch, logprobs, torch.ones_like(logprobs), Normalizer.of(batch.loss_mask))


@pytest.mark.parametrize("case", golden("dspo", "Objective"))
def test_golden_objective(case: dict[str, Any]) -> None:
    """Term by term (a batch of one, the same advantages) and whole."""
    batch, logprobs = experience(MEANS, deviation=case["deviation"])
    found = GroupAdvantage(deviation=case["deviation"])(batch).advantages
    assert found[:, 1].tolist() == near(case["advantages"])  # type: ignore[index]
    part = by_sequence(*clip_range(case["clip"]))
    loss, metrics = run(part, batch, logprobs)
    assert loss.item() == near(-case["J"])
    assert metrics["loss"].item() == near(-case["J"])
    assert metrics["clip_fraction"].item() == near(len(case["clipped"]) / 4)
    loss.backward()
    assert [i for i in range(4) if not logprobs.grad[i].any()] == case["clipped"]  # type: ignore[index]
    for i, term in enumerate(case["terms"]):
        alone = batch.rows([i])
        assert run(part, alone, logprobs[[i]])[0].item() == near(-term)
    ratio = sequence_ratios(logprobs, batch.old_logprobs, batch.loss_mask)  # type: ignore[arg-type]
    assert ratio.tolist() == near([1.051271, 0.980199, 1.349859, 0.740818])


@pytest.mark.parametrize("case", golden("dspo", "Trajectory against token"))
def test_golden_sequence_against_token_level(case: dict[str, Any]) -> None:
    """The same sequence ratios spread over 2, 4, 3 and 1 tokens."""
    batch, logprobs = experience(TOKENS)
    part = make_loss(0.2, 0.2, case["aggregation"], ratio=case["ratio"])
    assert run(part, batch, logprobs)[0].item() == near(-case["J"])


# Slow implementations -------------------------------------------------------------------------------------------------


def slow_loss(
    new: list[list[float]], old: list[list[float]], mask: list[list[bool]], advantages: list[float], low: float,
    high: float,
) -> tuple[float, float]:  # fmt: skip
    """Loss and clip fraction, token by token in plain Python."""
    total, clipped, count = 0.0, 0, 0
    for a, b, own, advantage in zip(new, old, mask, advantages, strict=True):
        differences = [x - y for x, y, mine in zip(a, b, own, strict=True) if mine]
        if not differences:
            continue
        count += 1
        ratio = math.exp(sum(differences) / len(differences))
        near_ratio = min(max(ratio, 1 - low), 1 + high)
        total += min(ratio * advantage, near_ratio * advantage)
        clipped += near_ratio * advantage < ratio * advantage
    return -total / max(count, 1), clipped / max(count, 1)


def naive_loss(new: Tensor, batch: Experience, advantages: Sequence[float], low: float, high: float) -> Tensor:
    """The printed formula on selected tokens, for autograd."""
    terms = []
    for i, advantage in enumerate(advantages):
        own = batch.loss_mask[i]
        if own.any():
            s = (new[i][own] - batch.old_logprobs[i][own]).mean().exp()  # type: ignore[index]
            terms.append(torch.min(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    return -torch.stack(terms).mean() if terms else (new * 0.0).sum()


def detached_loss(new: Tensor, batch: Experience, advantages: Sequence[float], low: float, high: float) -> Tensor:
    """Per-token tensors: detached s times exp(logp - detach(logp)), averaged per trajectory, then over trajectories."""
    mask = batch.loss_mask
    s = sequence_ratios(new, batch.old_logprobs, mask).detach()  # type: ignore[arg-type]
    per_token = s[:, None] * torch.where(mask, new - new.detach(), 0.0).exp()
    advantage = tensor(list(advantages), dtype=F64)[:, None]
    chosen = torch.min(per_token * advantage, per_token.clamp(1 - low, 1 + high) * advantage)
    return -aggregate(chosen, mask, "seq_mean")


numbers = st.floats(-1.5, 1.5).map(lambda x: round(x, 6))
bounds = st.floats(0.01, 0.5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Experience, Tensor, list[float]]:
    """Rows of different lengths with any mask (one at least has a generated token)."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    log_ratios = [draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths]
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    assume(any(any(mask) for mask in masks))
    advantages = [draw(numbers) for _ in lengths]
    batch, new = experience(log_ratios, [0.0] * len(lengths), masks=masks, advantages=advantages)
    return batch, new, advantages


def off_the_edges(batch: Experience, new: Tensor, low: float, high: float) -> None:
    """On the kink itself the derivative is not defined."""
    ratio = sequence_ratios(new.detach(), batch.old_logprobs, batch.loss_mask)  # type: ignore[arg-type]
    for edge in (1 - low, 1 + high):
        assume((ratio - edge).abs().min() > 1e-9)


@many
@given(batches(), bounds, bounds)
def test_loss_and_gradient_agree_with_the_slow_ones(
    made: tuple[Experience, Tensor, list[float]], low: float, high: float
) -> None:
    batch, new, advantages = made
    off_the_edges(batch, new, low, high)
    loss, metrics = run(by_sequence(low, high), batch, new)
    loss.backward()
    old, mask = batch.old_logprobs.tolist(), batch.loss_mask.tolist()  # type: ignore[union-attr]
    slow, share = slow_loss(new.tolist(), old, mask, advantages, low, high)
    assert loss.item() == pytest.approx(slow, abs=1e-9)
    assert metrics["clip_fraction"].item() == pytest.approx(share, abs=1e-6)
    for other in (naive_loss, detached_loss):
        again = new.detach().clone().requires_grad_()
        value = other(again, batch, advantages, low, high)
        value.backward()
        assert value.item() == pytest.approx(loss.item(), abs=1e-9)
        torch.testing.assert_close(again.grad, new.grad, rtol=0, atol=1e-9)


@many
@given(batches(), bounds, st.data())
def test_micro_batches_add_up_to_the_mini_batch(
    made: tuple[Experience, Tensor, list[float]], clip: float, data: st.DataObject
) -> None:
    batch, new, _ = made
    part = by_sequence(clip, clip, kl_coefficient=0.1)
    whole, metrics = run(part, batch, new)
    whole.backward()
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    again = new.detach().clone().requires_grad_()
    total, clipped = 0.0, 0.0
    for rows in (order[:cut], order[cut:]):
        if not rows:
            continue
        micro = batch.rows(rows)
        logprobs = again[rows][:, : micro.ids.shape[1]]
        loss, own = part(micro, logprobs, torch.ones_like(logprobs), Normalizer.of(batch.loss_mask))
        loss.backward()
        total += loss.item()
        clipped += own["clip_fraction"].item()
    assert total == pytest.approx(whole.item(), abs=1e-9)
    assert clipped == pytest.approx(metrics["clip_fraction"].item(), abs=1e-6)
    torch.testing.assert_close(again.grad, new.grad, rtol=0, atol=1e-9)


@many
@given(batches())
def test_an_unmoved_policy_has_ratio_exactly_one_and_the_plain_gradient(
    made: tuple[Experience, Tensor, list[float]],
) -> None:
    batch, _, advantages = made
    new = batch.old_logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    assert (sequence_ratios(new, batch.old_logprobs, batch.loss_mask) == 1).all()  # type: ignore[arg-type]
    loss, metrics = run(by_sequence(3e-4, 4e-4), batch, new)
    loss.backward()
    assert metrics["clip_fraction"].item() == 0.0
    plain = batch.old_logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    weighted = aggregate(plain * tensor(advantages, dtype=F64)[:, None], batch.loss_mask, "seq_mean")
    (-weighted).backward()
    torch.testing.assert_close(new.grad, plain.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 7.0])
def test_observations_and_padding_get_no_gradient(rubbish: float) -> None:
    """Whatever stands there: prompt, an observation in the middle, padding after the shorter row."""
    rows, masks = [[0.3, 9.0, -0.1], [0.2]], [[True, False, True], [True]]
    clean, new = experience(rows, (1.0, 0.0), masks=masks)
    part = by_sequence(0.2, 0.2, kl_coefficient=0.1)
    wanted, wanted_metrics = run(part, clean, new)
    wanted.backward()
    spoiled = {
        name: torch.where(clean.loss_mask, getattr(clean, name), rubbish)
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    batch = replace(clean, **spoiled)  # type: ignore[arg-type]
    logprobs = torch.where(clean.loss_mask, new.detach(), rubbish).requires_grad_()
    entropy = torch.where(clean.loss_mask, torch.ones_like(logprobs), rubbish)
    loss, metrics = part(batch, logprobs, entropy, Normalizer.of(batch.loss_mask))
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item())
    assert {k: v.item() for k, v in metrics.items()} == {k: near(v.item()) for k, v in wanted_metrics.items()}
    assert logprobs.grad is not None
    assert (logprobs.grad[~batch.loss_mask] == 0).all()
    torch.testing.assert_close(logprobs.grad, new.grad)


def test_a_clipped_trajectory_loses_all_its_tokens_and_no_other_does() -> None:
    batch, new = experience(([0.9, -0.1], [0.0, 0.3, -0.3]), (1.0, 0.0))
    loss, metrics = run(by_sequence(0.2, 0.2), batch, new)
    loss.backward()
    assert metrics["clip_fraction"].item() == 0.5  # of trajectories, not of tokens (2 of 5)
    assert new.grad is not None
    assert not new.grad[0].any()
    assert new.grad[1, 1:].tolist() == near([new.grad[1, 1].item()] * 3)  # one weight for the whole trajectory
    assert new.grad[1, 1].item() == near(0.707106 * 1 / 3 / 2)


def test_trajectories_far_from_the_old_policy_give_finite_numbers() -> None:
    for far in (1e4, -1e4):
        batch, new = experience(([far, far], [0.1]), (1.0, 0.0))
        loss, _ = run(by_sequence(0.2, 0.2), batch, new)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(new.grad).all()  # type: ignore[arg-type]


def test_a_trajectory_without_generated_tokens_changes_nothing() -> None:
    rows, masks = ([0.1, 0.2], [0.5], [0.3]), [[True, True], [False], [True]]
    batch, new = experience(rows, (0.0,) * 3, masks=masks, advantages=[1.0, 5.0, -1.0])
    without = batch.rows([0, 2])
    loss, metrics = run(by_sequence(0.2, 0.2), batch, new)
    shorter, others = run(by_sequence(0.2, 0.2), without, new[[0, 2]])
    assert loss.item() == pytest.approx(shorter.item())
    assert metrics["clip_fraction"].item() == others["clip_fraction"].item()
    assert Normalizer.of(batch.loss_mask).sequences == 2


def test_kl_is_a_mean_of_trajectory_means() -> None:
    batch, new = experience(([0.0], [0.0, 0.0, 1.0]), (0.0, 0.0), advantages=[0.0, 0.0])
    found = run(by_sequence(0.2, 0.2, kl_coefficient=0.5), batch, new)[0].item()
    far = math.exp(-0.25) + 0.25 - 1, math.exp(-1.25) + 1.25 - 1  # k3 with ref - logp = -0.25, and -1.25 for the last
    assert found == near(0.5 * (far[0] + (2 * far[0] + far[1]) / 3) / 2)


def test_the_generator_is_corrected_for_by_the_trajectory() -> None:
    batch, new = experience(([0.05, 0.05], [-0.02] * 4), (1.0, 0.0))
    off = replace(batch, sampler_logprobs=batch.sampler_logprobs - 0.3)
    plain = run(by_sequence(0.2, 0.2), batch, new)[0].item()
    assert run(by_sequence(0.2, 0.2), off, new)[0].item() == pytest.approx(math.exp(0.3) * plain)
    assert run(by_sequence(0.2, 0.2, importance_cap=1.1), off, new)[0].item() == pytest.approx(1.1 * plain)
    assert run(by_sequence(0.2, 0.2, importance_cap=None), off, new)[0].item() == pytest.approx(plain)
