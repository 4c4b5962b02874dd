"""The parts of a method together: whose advantage, which masks, which tensors are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import tensor

from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import Experience, collate
from tasks.rl.filters import share_with_signal
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.losses import LossSum, Normalizer
from tasks.rl.method import component_means
from tasks.rl.samples import whole_trajectories
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tasks.types import Sample, Scores, Trajectory
from tests.papers import column, golden
from tests.tiny import make_loss, make_method

# Six response tokens as on docs/methods/ppo.md, of which 3 and 4 are an observation; a prompt of two before them.
OWN = (True, True, False, False, True, True)
VALUES = [0.2, 0.3, 0.1, 0.5, 0.4, 0.6]
OLD = [-1, -0.5, -2, -1.5, -0.7, -0.2]
REF = [-1.2, -0.4, -1, -3, -0.7, -0.5]


def experience(rewards: tuple[float, ...] = (1.0,), groups: tuple[str, ...] | None = None) -> Experience:
    groups = groups or ("g",) * len(rewards)
    rows = [Trajectory("q", g, (7, 8), (1, 2, 3, 4, 5, 6), OWN, (0.0,) * 6, (), "open") for g in groups]
    return collate(whole_trajectories(rows), [Scores(r, ((5, r),)) for r in rewards])


def at(values: list[float], count: int = 1) -> torch.Tensor:
    """[count, 8] with these values on the response; rubbish on the prompt."""
    return tensor([[9.0, -9.0, *values]] * count)


def close(found: torch.Tensor, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=0, atol=tolerance)


def test_group_advantage_golden() -> None:
    """On every generated token, 0 elsewhere."""
    for case in golden("grpo", "Group advantages"):
        batch = GroupAdvantage(deviation=case["deviation"])(experience(tuple(case["rewards"])))
        assert batch.advantages is not None
        for row, wanted in zip(batch.advantages, case["advantages"], strict=True):
            close(row, [0, 0, *(wanted * own for own in OWN)])
    assert not GroupAdvantage()(experience((1.0,) * 5)).advantages.any()  # type: ignore[union-attr]


def test_group_advantage_by_group_in_any_order() -> None:
    rewards, groups = (1.0, 0.5, 0.0, 1.0, 0.25), ("a", "b", "a", "b", "a")
    whole = GroupAdvantage()(experience(rewards, groups)).advantages
    assert whole is not None
    order = [4, 2, 0, 3, 1]
    moved = GroupAdvantage()(experience(tuple(rewards[i] for i in order), tuple(groups[i] for i in order))).advantages
    close(moved, whole[order])  # type: ignore[arg-type]
    close(whole[[0, 2, 4], 2].sum(), 0.0)
    close(whole[[1, 3], 2].sum(), 0.0)


def test_gae_golden() -> None:
    """k1 in the token rewards, whitening over the generated tokens or, as released, all of them."""
    whitened = column("ppo", "Whitened advantages", "statistics over", "advantages")
    kl = column("ppo", "KL in the reward", "quantity", "values")
    batch = replace(experience(), values=at(VALUES), old_logprobs=at(OLD), ref_logprobs=at(REF))
    found = TokenGae(1.0, 1.0, 0.0)(batch)
    close(found.returns[0, 2:], [1.0] * 6)  # type: ignore[index]
    close(found.advantages[0, 2:], whitened["generated"])  # type: ignore[index]
    close(found.advantages[0, :2], [0, 0])  # type: ignore[index]
    released = TokenGae(1.0, 1.0, 0.0, whiten_over="response")(batch).advantages
    close(released[0, 2:], whitened["response"])  # type: ignore[index]
    with_kl = TokenGae(1.0, 1.0, 0.001)(batch)
    raw = with_kl.returns[0, 2:] - tensor(VALUES)  # type: ignore[index]
    close(raw, kl["advantage"])
    # Value targets are advantage + value.
    for case in golden("ppo", "Generalised advantages"):
        traced = TokenGae(case["gamma"], case["lam"], 0.0)(batch).returns[0, 2:] - tensor(VALUES)  # type: ignore[index]
        close(traced, case["advantages"])


def loss_of(part: LossSum, batch: Experience, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return part(batch, logprobs, torch.full_like(logprobs, 2.0), Normalizer.of(batch.loss_mask))


def clip_batch() -> tuple[Experience, torch.Tensor]:
    """Clipped losses as on docs/methods/ppo.md."""
    batch = replace(
        experience(), old_logprobs=at(OLD), ref_logprobs=at(REF), advantages=at([1, 1, 1, 1, -1, -1]),
        sampler_logprobs=at(OLD),
    )  # fmt: skip
    return batch, at([-0.7, -0.5, -2, -1.5, -0.9, -0.15]).requires_grad_()


def test_clipped_loss_golden() -> None:
    batch, logprobs = clip_batch()
    loss, metrics = loss_of(make_loss(0.2, 0.2), batch, logprobs)
    close(loss, -0.0825)
    close(metrics["clip_fraction"], 0.25)  # of the ratios 1.35, 1, 0.82, 1.05 the first; 0.82 is inside 1 - 0.2
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].nonzero()[:, 0].tolist() == [3, 6, 7]  # token 2 is clipped, 0-1 prompt, 4-5 observation
    close(loss_of(make_loss(0.2, 0.28), batch, logprobs)[0], -0.1025)


def test_kl_and_entropy_terms() -> None:
    batch, logprobs = clip_batch()
    plain = loss_of(make_loss(0.2, 0.2), batch, logprobs)[0]
    d = torch.where(batch.loss_mask, batch.ref_logprobs - logprobs, 0.0)  # type: ignore[operator]
    k3 = ((d.exp() - d - 1) * batch.loss_mask).sum() / 4
    close(loss_of(make_loss(0.2, 0.2, kl_coefficient=0.5), batch, logprobs)[0], float((plain + 0.5 * k3).detach()))
    close(loss_of(make_loss(0.2, 0.2, entropy_coefficient=0.1), batch, logprobs)[0], float(plain.detach()) - 0.2)


def test_importance_weights_correct_for_the_generator() -> None:
    batch, logprobs = clip_batch()
    off = replace(batch, sampler_logprobs=at(OLD) - 0.3)  # drawn as if e^0.3 less likely than the trainer holds them
    plain = float(loss_of(make_loss(0.2, 0.2), batch, logprobs)[0].detach())
    close(loss_of(make_loss(0.2, 0.2), off, logprobs)[0], 2.718281828**0.3 * plain)
    close(loss_of(make_loss(0.2, 0.2, importance_cap=1.1), off, logprobs)[0], 1.1 * plain)
    close(loss_of(make_loss(0.2, 0.2, importance_cap=None), off, logprobs)[0], plain)


def test_an_unmoved_policy() -> None:
    """Ratio exactly 1, nothing clipped, the loss is minus the mean advantage, its gradient that of -A log p."""
    batch, _ = clip_batch()
    logprobs = at(OLD).requires_grad_()
    loss, metrics = loss_of(make_loss(0.2, 0.2), batch, logprobs)
    assert float(metrics["ratio_mean"]) == 1.0
    assert float(metrics["clip_fraction"]) == 0.0
    assert float(metrics["approx_kl"]) == 0.0
    assert float(loss.detach()) == 0.0  # advantages 1, 1, -1, -1
    loss.backward()
    close(logprobs.grad[0], [0, 0, -0.25, -0.25, 0, 0, 0.25, 0.25])  # type: ignore[index]


def test_value_loss_golden() -> None:
    """Only generated tokens count; observations, too, as released."""
    (mean,) = column("ppo", "Value loss", "quantity", "values")["mean"]
    batch = replace(experience(), values=at([0.2, 0.3, 5, 5, 1, 1]), returns=at([1, 1, 0, 0, 1, 1]))
    batch = replace(batch, loss_mask=batch.loss_mask & (torch.arange(8) < 4))
    values = at([0.25, 0.9, 5, 5, 1, 1]).requires_grad_()
    part = ClippedValueLoss(0.5)
    loss = part(batch, values, Normalizer.of(part.mask(batch)))
    close(loss, mean)
    loss.backward()
    assert values.grad is not None
    assert set(values.grad[0].nonzero()[:, 0].tolist()) <= {2, 3}
    released = ClippedValueLoss(0.5, over="response")
    close(released(batch, values, Normalizer.of(released.mask(batch))), (2 * mean + 2 * 12.5) / 6)


@pytest.mark.parametrize(
    ("algorithm", "kl", "reference", "values"),
    [("grpo", 0.001, True, False), ("grpo", 0.0, False, False), ("ppo", 0.001, True, True), ("ppo", 0.0, False, True)],
)
def test_parts_ask_for_what_they_read(tokenizer: Any, algorithm: str, kl: float, reference: bool, values: bool) -> None:
    """PPO's penalty is in the reward, GRPO's in the loss; a critic only where values are read."""
    method = make_method(algorithm, tokenizer, kl_coefficient=kl)
    assert method.needs_reference is reference
    assert method.advantage.needs_values is values
    assert (method.value_loss is not None) is values
    assert method.loss.needs_reference is (reference and algorithm == "grpo")


@pytest.mark.parametrize(
    "change",
    [{"clip": 1.4}, {"clip": -0.1}, {"kl_coefficient": -1.0}, {"importance_cap": 0.5}, {"group_size": 0}],
)
def test_numbers_out_of_bounds(tokenizer: Any, change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_method("grpo", tokenizer, **change)


@pytest.mark.parametrize("change", [{"gamma": 1.1}, {"lam": -0.1}, {"kl_coefficient": -1.0}])
def test_numbers_of_ppo_out_of_bounds(tokenizer: Any, change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        make_method("ppo", tokenizer, **change)


def test_signal_and_filter() -> None:
    rows = [Sample("q", g, (1,), (2,), (True,), (0.0,)) for g in "aabbc"]
    scores = [Scores(v, ()) for v in (1.0, 0.0, 1.0, 1.0, 0.0)]
    assert share_with_signal(rows, scores) == pytest.approx(1 / 3)
    assert share_with_signal([], []) == 0.0
    assert KeepAll().keep(rows, scores) == [0, 1, 2, 3, 4]


def test_outcome_parts() -> None:
    assert component_means(("em", "f1"), [{"em": 1.0}, {"em": 0.0, "x": 3.0}]) == {"em_mean": 0.5}
