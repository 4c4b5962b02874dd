"""The reward model's losses: golden values, an independent slow implementation, and what happens near 0 and 1."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.reward_model.losses import final_loss, gains, gold_loss, hazard_loss, losses, negative_log_gain
from tasks.reward_model.quality import rewards
from tasks.reward_model.settings import LossConf
from tests.papers import column

CONF = LossConf()
F = [0.2, 0.3, 0.6, 0.5, 0.9]


def logits(probabilities: list[float]) -> Tensor:
    return torch.logit(torch.tensor(probabilities, dtype=torch.float64))


def near(values: object) -> object:
    return pytest.approx(values, abs=1e-6)


def test_gains_and_rewards_of_the_page() -> None:
    wanted = column("pica", "Rewards of turns", "quantity", "values")
    assert gains(logits(F), CONF).tolist() == near(wanted["g"])
    assert rewards(F, CONF.clamp) == near(wanted["reward"])
    assert sum(rewards(F, CONF.clamp)) == near(math.log(0.9 / 0.2))
    product = math.prod(1 + gain for gain in gains(logits(F), CONF).tolist())
    assert 0.2 * product == near(0.9)


def test_losses_of_the_page() -> None:
    wanted = column("pica", "Reward model losses", "quantity", "value")
    final, gold = losses(logits(F), [True, True, False], True, CONF)
    assert float(final) == near(wanted["L_final"])
    assert float(gold) == near(wanted["L_gold"])
    assert float(final + 0.5 * gold) == near(wanted["L"])
    assert float(final_loss(logits(F), False)) == near(2.302585)
    assert float(final_loss(logits([0.5, 0.2]), False)) == near(0.223144)


def test_the_tangent_of_the_page() -> None:
    for row in column("pica", "Gain losses", "g", "-log g, continued").items():
        assert float(negative_log_gain(torch.tensor(float(row[0]), dtype=torch.float64), CONF)) == near(row[1])
    form = replace(CONF, gold_form="reward")
    assert float(gold_loss(logits([0.5, 0.4]), [True], form)) == near(0.223144)


def test_clamped_rewards_of_the_page() -> None:
    wanted = column("pica", "Clamped rewards", "quantity", "values")
    found = rewards([0.5, 0.0, 0.4, 1.0], 1e-4)
    assert found == near(wanted["reward"])
    assert [min(max(value, -1), 1) for value in found] == near(wanted["cut"])
    assert sum(rewards([0.5, 0.0, 0.4, 1.0], 1e-4)) == near(0.693047)


def test_hazard_losses_of_the_page() -> None:
    wanted = column("pica", "Release's reward model", "quantity", "value")
    given_ = logits([0.5, 0.1, 0.3, 0.6])  # The place after the question is no step.
    assert float(hazard_loss(given_, [True, True], True)) == near(wanted["L_S"])
    wrong = float(hazard_loss(given_, [True, True], False))  # The first wrong step is the third, the end.
    assert wrong == near(wanted["L_W"] + wanted["L_z"])
    assert float(hazard_loss(given_, [True, False], False)) == near(wanted["L_W"] - math.log(0.3) - math.log(0.9))


def test_each_part_of_the_hazard_loss_of_the_page() -> None:
    """A certain error at the end makes L_W vanish and leaves L_z; what the sum has more without it is L_W."""
    wanted = column("pica", "Release's reward model", "quantity", "value")
    assert math.exp(-wanted["L_S"]) == near(wanted["S"])
    assert wanted["L_W"] == near(-math.log(1 - wanted["S"]))
    three = logits([0.5, 0.1, 0.3, 0.6])
    ended = torch.cat([three, torch.tensor([60.0], dtype=torch.float64)])
    at_first = float(hazard_loss(ended, [True, True, False], False))
    assert at_first == near(wanted["L_z"])
    assert float(hazard_loss(three, [True, True], False)) - at_first == near(wanted["L_W"])

    # Who never dies may be wrong at a cost of log(1e-5), and its first error costs what that hazard says.
    safe = torch.tensor([0.0, -30.0, -30.0], dtype=torch.float64)
    assert float(hazard_loss(safe, [False], False)) == near(-math.log(1e-5) + 30.0)


def slow(values: list[float], pivots: list[bool], is_right: bool, conf: LossConf) -> float:
    """The definition, number by number, without tensors."""
    f = [1 / (1 + math.exp(-value)) for value in values]
    final = -math.log(f[-1]) if is_right else -math.log(1 - f[-1])
    gold = 0.0
    for (before, after), is_pivot in zip(itertools.pairwise(f), pivots, strict=False):
        gain = after / max(before, conf.clamp) - 1
        if is_pivot and gain >= conf.margin:
            gold -= math.log(min(gain, conf.cap))
        elif is_pivot:
            gold += -math.log(conf.margin) - (gain - conf.margin) / conf.margin
    return final + conf.gold_weight * gold


@given(st.lists(st.tuples(st.floats(-12, 12), st.booleans()), min_size=1, max_size=7), st.booleans(), st.floats(-9, 9))
def test_the_losses_equal_a_slow_implementation(steps: list[tuple[float, bool]], is_right: bool, start: float) -> None:
    values = [start, *(value for value, _ in steps)]
    pivots = [is_pivot for _, is_pivot in steps[:-1]]
    final, gold = losses(torch.tensor(values, dtype=torch.float64), pivots, is_right, CONF)
    assert float(final + CONF.gold_weight * gold) == pytest.approx(slow(values, pivots, is_right, CONF), rel=1e-7)


@given(st.lists(st.floats(-200, 200), min_size=2, max_size=6), st.booleans(), st.sampled_from(["success", "hazard"]))
def test_no_logit_gives_an_infinite_loss_or_gradient(values: list[float], is_right: bool, head: str) -> None:
    given_ = torch.tensor(values, requires_grad=True)
    pivots = [True] * (len(values) - 2)
    final, gold = losses(given_, pivots, is_right, replace(CONF, head=head))  # type: ignore[arg-type]
    (final + gold).backward()
    assert torch.isfinite(final + gold)
    assert given_.grad is not None
    assert torch.isfinite(given_.grad).all()


def test_a_negative_gain_is_pulled_up_and_a_large_one_is_left_alone() -> None:
    below = logits([0.5, 0.1, 0.5]).requires_grad_()
    gold_loss(below, [True], CONF).backward()  # type: ignore[no-untyped-call]
    assert below.grad is not None
    assert below.grad[1] < 0 < below.grad[0]
    above = logits([0.01, 0.9, 0.5]).requires_grad_()
    gold_loss(above, [True], CONF).backward()  # type: ignore[no-untyped-call]
    assert above.grad is not None
    assert above.grad.tolist() == [0, 0, 0]
    form = replace(CONF, gold_form="reward")
    assert float(gold_loss(above.detach(), [True], form)) == near(-math.log(1 + CONF.cap))


def test_f_below_the_clamp_is_not_pushed_further_down() -> None:
    tiny = torch.tensor([-15.0, -12.0, 0.0], requires_grad=True)
    gold_loss(tiny, [True], CONF).backward()  # type: ignore[no-untyped-call]
    assert tiny.grad is not None
    assert tiny.grad[0] == 0
    assert tiny.grad[1] < 0


def test_the_curve_of_the_gain_has_no_step() -> None:
    values = torch.linspace(-1, 12, 4001, dtype=torch.float64)
    loss = negative_log_gain(values, CONF)
    steps = loss.diff() / values.diff()
    assert (steps <= 0).all()
    assert float(loss.diff().abs().max()) < 0.1
    assert negative_log_gain(torch.tensor(10.0), CONF) == negative_log_gain(torch.tensor(99.0), CONF)


def test_a_trajectory_without_a_search_learns_from_its_outcome_alone() -> None:
    final, gold = losses(logits([0.3, 0.8]), [], True, CONF)
    assert float(final) == near(-math.log(0.8))
    assert float(gold) == 0


def test_rewards_telescope() -> None:
    draw = random.Random(0)
    for _ in range(50):
        f = [draw.uniform(1e-3, 1 - 1e-3) for _ in range(draw.randint(2, 9))]
        assert sum(rewards(f, 1e-4)) == near(math.log(f[-1]) - math.log(f[0]))
