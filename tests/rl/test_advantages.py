"""Advantages against the golden values of their pages and against slow second implementations."""

import itertools
import math
import statistics
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from tasks.rl.advantages.gae import TokenGae, gae, turn_gae, whiten
from tasks.rl.advantages.group import GroupAdvantage, group_normalized
from tasks.rl.advantages.own_reward import OwnReward
from tasks.rl.experience import Experience
from tasks.rl.logprobs import k1
from tests.papers import column, golden

F64 = torch.float64
many = settings(max_examples=150)
numbers = st.floats(-5, 5, allow_nan=False)
units = st.floats(0, 1)
VALUES = [0.2, 0.3, 0.1, 0.5, 0.4, 0.6]
OWN = [True, True, False, False, True, True]  # tokens 3 and 4 are observation
CANDIDATES = golden("slate", "Candidates")


def row(values):
    return tensor([values], dtype=F64)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


def experience_of(rewards, loss_mask, group_ids=("g",), old=None, ref=None, values=None):
    """Samples without a prefix: every token is one of the response."""
    count, width = rewards.shape
    everything = torch.ones(count, width, dtype=torch.bool)
    return Experience(
        torch.ones(count, width, dtype=torch.long), torch.full((count,), width), everything, loss_mask, rewards,
        group_ids, torch.zeros(count, width), old, ref, values,
    )  # fmt: skip


# Golden groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*golden("grpo", "Group advantages"), *CANDIDATES])
def test_group_golden(case):
    rewards = tensor(case.get("rewards", [2, 1, 2.05, -1, 0]), dtype=F64)
    close(group_normalized(rewards, ["q"] * len(rewards), deviation=case["deviation"]), case["advantages"])


@pytest.mark.parametrize("parts", [[0.1, 0.7, 0.2], [0.1, 0.2, 0.3], [1 / 3, 0.2, 0.6], [2.5, 1e-3, 0.7]])
def test_equal_rewards_on_other_turns_are_no_difference(parts):
    """Whichever turns have them: a group whose members earn the same teaches nothing."""
    rewards = tensor([list(order) for order in itertools.permutations(parts)], dtype=torch.float32)
    mask = torch.ones_like(rewards, dtype=torch.bool)
    found = GroupAdvantage()(experience_of(rewards, mask, ("g",) * len(rewards)))
    assert torch.equal(found.advantages, torch.zeros_like(rewards))


def slow_group(scores, ids, eps, deviation):
    """One trajectory at a time, with the statistics module."""
    result = []
    for score, own in zip(scores, ids, strict=True):
        group = [s for s, other in zip(scores, ids, strict=True) if other == own]
        if len(group) == 1:
            result.append(score)
        elif len(set(group)) == 1:
            result.append(0.0)
        else:
            std = statistics.stdev(group) if deviation == "sample" else statistics.pstdev(group)
            result.append((score - statistics.mean(group)) / (std + eps))
    return result


some_scores = st.one_of(numbers, st.sampled_from([0.0, 1.0, 0.1]))
grouped = st.lists(st.tuples(st.sampled_from("abcd"), some_scores), min_size=1, max_size=24)
deviations = st.sampled_from(["sample", "population"])


@many
@given(grouped, deviations, st.sampled_from([1e-6, 1e-3]))
def test_group_agrees_with_the_slow_one(rows, deviation, eps):
    ids, scores = zip(*rows, strict=True)
    found = group_normalized(tensor(scores, dtype=F64), ids, eps, deviation)
    close(found, slow_group(scores, ids, eps, deviation), 1e-7)


@many
@given(grouped, deviations)
def test_group_sums_to_zero_and_equal_scores_give_exactly_zero(rows, deviation):
    ids, scores = zip(*rows, strict=True)
    found = group_normalized(tensor(scores, dtype=F64), ids, deviation=deviation)
    for group in set(ids):
        own = [i for i, other in enumerate(ids) if other == group]
        if len(own) == 1:
            assert found[own[0]] == scores[own[0]]
        else:
            assert abs(found[own].sum().item()) < 1e-7
        if len(own) > 1 and len({scores[i] for i in own}) == 1:
            assert (found[own] == 0).all()


@many
@given(grouped, deviations, st.randoms(use_true_random=False))
def test_group_follows_a_permutation(rows, deviation, rng):
    order = list(range(len(rows)))
    rng.shuffle(order)
    ids, scores = zip(*rows, strict=True)
    before = group_normalized(tensor(scores, dtype=F64), ids, deviation=deviation)
    after = group_normalized(
        tensor([scores[i] for i in order], dtype=F64), [ids[i] for i in order], deviation=deviation
    )
    torch.testing.assert_close(after, before[order], rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, -2.3])
@pytest.mark.parametrize("size", [3, 5, 7, 11])
def test_equal_float32_scores_give_exactly_zero(value, size):
    assert group_normalized(torch.full((size,), value), ["q"] * size).tolist() == [0.0] * size


def test_groups_do_not_mix():
    # The same row index of two datasets is two prompts.
    found = group_normalized(tensor([1.0, 0.0, 5.0, 5.0], dtype=F64), ["nq/7", "nq/7", "hotpot/7", "hotpot/7"])
    close(found, [0.707106, -0.707106, 0, 0])


def test_a_missing_group_id_is_an_error():
    with pytest.raises(ValueError, match="2 scores but 1 group ids"):
        group_normalized(tensor([1.0, 0.0]), ["q"])


def test_no_trajectories():
    assert group_normalized(tensor([], dtype=F64), []).tolist() == []


@pytest.mark.parametrize("case", CANDIDATES)
def test_the_part_gives_golden_advantages_to_every_trained_token(case):
    """The rewards of a sample are added up, wherever they lie; observations get nothing."""
    rewards = torch.zeros(5, 4, dtype=F64)
    rewards[:, 1], rewards[:, 3] = 1, tensor([1, 0, 1.05, -2, -1], dtype=F64)
    experience = experience_of(rewards, tensor([[False, True, False, True]] * 5), ("q",) * 5)
    found = GroupAdvantage(1e-6, case["deviation"])(experience).advantages
    close(found, [[0, a, 0, a] for a in case["advantages"]])
    wide = GroupAdvantage(0.5, case["deviation"])(experience).advantages
    close(wide[:, 1], slow_group([2, 1, 2.05, -1, 0], "q" * 5, 0.5, case["deviation"]))


def test_a_samples_own_reward_is_the_sum_on_its_trained_tokens():
    rewards = row([0, 1.5, 0.25, -0.5])
    experience = experience_of(rewards, tensor([[False, True, False, True]]), ("q",))
    close(OwnReward()(experience).advantages, [[0, 1.25, 0, 1.25]])


# Golden GAE ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("ppo", "Generalised advantages"))
def test_gae_golden(case):
    advantages, targets = gae(row([0, 0, 0, 0, 0, 1]), row(VALUES), tensor([OWN]), case["gamma"], case["lam"])
    expected = case["advantages"]
    close(advantages, [expected])
    close(targets, [[a + v for a, v in zip(expected, VALUES, strict=True)]])


def test_gae_golden_with_the_kl_penalty_in_the_reward():
    old, ref = row([-1, -0.5, -2, -1.5, -0.7, -0.2]), row([-1.2, -0.4, -1, -3, -0.7, -0.5])
    penalty = k1(old, ref, tensor([OWN]))
    rewards = row([0, 0, 0, 0, 0, 1]) - 0.001 * penalty
    expected = column("ppo", "KL in the reward", "quantity", "values")
    close(penalty, [expected["k1"]])
    close(rewards, [expected["reward"]])
    close(gae(rewards, row(VALUES), tensor([OWN]), 1.0, 1.0)[0], [expected["advantage"]])


def slow_gae(rewards, values, own, gamma, lam):
    """The defining sum A_t = sum_l (gamma lam)^l delta_{t+l}, over the tokens up to the last generated one."""
    length = max((t + 1 for t, mine in enumerate(own) if mine), default=0)
    deltas = []
    for t in range(length):
        following = values[t + 1] if t + 1 < length else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    advantages = [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]
    padding = [0.0] * (len(own) - length)
    return advantages + padding, [a + values[t] for t, a in enumerate(advantages)] + padding


tokens = st.tuples(numbers, numbers, st.booleans())


@st.composite
def batches(draw, max_rows=4, max_tokens=9):
    """A ragged batch: rewards, values and mask, [B][T] each."""
    width = draw(st.integers(1, max_tokens))
    rows = draw(st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=1, max_size=max_rows))
    return [[[token[i] for token in r] for r in rows] for i in range(3)]


@many
@given(batches(), units, units)
def test_gae_agrees_with_the_defining_sum(batch, gamma, lam):
    rewards, values, own = batch
    advantages, targets = gae(tensor(rewards, dtype=F64), tensor(values, dtype=F64), tensor(own), gamma, lam)
    expected = [slow_gae(*r, gamma, lam) for r in zip(rewards, values, own, strict=True)]
    close(advantages, [a for a, _ in expected], 1e-9)
    close(targets, [r for _, r in expected], 1e-9)


@many
@given(batches())
def test_without_discounts_an_advantage_is_what_is_still_to_come_minus_the_value(batch):
    rewards, values, own = batch
    advantages, targets = gae(tensor(rewards, dtype=F64), tensor(values, dtype=F64), tensor(own), 1.0, 1.0)
    for b, mine in enumerate(own):
        last = max((t for t, m in enumerate(mine) if m), default=-1)
        for t in range(last + 1):
            assert advantages[b, t].item() == pytest.approx(sum(rewards[b][t : last + 1]) - values[b][t], abs=1e-9)
            assert targets[b, t].item() == pytest.approx(sum(rewards[b][t : last + 1]), abs=1e-9)


@many
@given(batches(), units)
def test_with_lambda_zero_an_advantage_is_one_temporal_difference(batch, gamma):
    rewards, values, own = batch
    advantages, _ = gae(tensor(rewards, dtype=F64), tensor(values, dtype=F64), tensor(own), gamma, 0.0)
    for b, mine in enumerate(own):
        last = max((t for t, m in enumerate(mine) if m), default=-1)
        for t in range(last + 1):
            following = values[b][t + 1] if t < last else 0.0
            assert advantages[b, t].item() == pytest.approx(rewards[b][t] + gamma * following - values[b][t], abs=1e-9)


@pytest.mark.parametrize("rubbish", [7.0, math.inf, -math.inf, math.nan])
def test_what_stands_in_the_padding_does_not_matter(rubbish):
    own = tensor([[True, False, True, False, False]])
    rewards, values = row([0.1, 0, 1, rubbish, rubbish]), row([0.2, 0.3, 0.4, rubbish, rubbish])
    alone = gae(rewards[:, :3], values[:, :3], own[:, :3], 0.9, 0.8)
    padded = gae(rewards, values, own, 0.9, 0.8)
    for long, short in zip(padded, alone, strict=True):
        close(long, [[*short[0].tolist(), 0.0, 0.0]], 1e-12)


def test_gae_of_a_row_without_generated_tokens_is_zero():
    advantages, targets = gae(row([1, 1]), row([0.5, 0.5]), tensor([[False, False]]), 1.0, 1.0)
    assert advantages.tolist() == targets.tolist() == [[0.0, 0.0]]


# Whitening --------------------------------------------------------------------------------------------------------


def test_whiten_golden():
    advantages = row(golden("ppo", "Generalised advantages")[0]["advantages"])
    expected = column("ppo", "Whitened advantages", "statistics over", "advantages")
    close(whiten(advantages, torch.ones(1, 6, dtype=torch.bool)), [expected["response"]])
    close(whiten(advantages, tensor([OWN])), [expected["generated"]])


@many
@given(batches())
def test_whiten_agrees_with_the_slow_one(batch):
    values, _, own = batch
    chosen = [v for r, m in zip(values, own, strict=True) for v, mine in zip(r, m, strict=True) if mine]
    mean = statistics.fmean(chosen) if chosen else 0.0
    scale = 1 / math.sqrt(statistics.variance(chosen) + 1e-8) if len(chosen) > 1 else 1.0
    rounding = 4 * sys.float_info.epsilon * max(map(abs, chosen), default=0.0) * scale  # Of the mean.
    found = whiten(tensor(values, dtype=F64), tensor(own))
    for row_found, r, m in zip(found.tolist(), values, own, strict=True):
        slow = [(v - mean) * scale if mine else 0.0 for v, mine in zip(r, m, strict=True)]
        assert row_found == pytest.approx(slow, abs=1e-12 + rounding)


@pytest.mark.parametrize("over", ["generated", "response"])
def test_the_part_whitens_over_the_tokens_it_names(over):
    """Golden advantages and whitening at once; a prefix in front has no rewards, no values and no advantages."""
    rewards, values = row([0, 0, 0, 0, 0, 0, 0, 1]), row([7, 7, *VALUES])
    experience = experience_of(rewards, tensor([[False, False, *OWN]]), values=values)
    is_own = torch.arange(8) >= 2
    found = TokenGae(1.0, 1.0, 0.0, over)(replace(experience, response_mask=is_own[None]))
    expected = column("ppo", "Whitened advantages", "statistics over", "advantages")
    close(found.advantages, [[0, 0, *expected[over]]])
    close(found.returns[:, 2:], [[1] * 6])


def test_the_kl_of_a_token_is_taken_from_its_reward():
    """Golden advantages with the penalty, before they are whitened."""
    old, ref = row([-1, -0.5, -2, -1.5, -0.7, -0.2]), row([-1.2, -0.4, -1, -3, -0.7, -0.5])
    experience = experience_of(row([0, 0, 0, 0, 0, 1]), tensor([OWN]), ("g",), old, ref, row(VALUES))
    expected = column("ppo", "KL in the reward", "quantity", "values")["advantage"]
    close(TokenGae(1.0, 1.0, 0.001)(experience).returns, [[a + v for a, v in zip(expected, VALUES, strict=True)]])


@many
@given(batches())
def test_whitened_advantages_have_mean_zero(batch):
    values, _, own = batch
    found = whiten(tensor(values, dtype=F64), tensor(own))
    assert abs(found.sum().item()) < 1e-6
    assert torch.isfinite(found).all()


def test_whiten_ignores_what_stands_off_the_mask():
    found = whiten(row([1, math.nan, 3, math.inf]), tensor([[True, False, True, False]]))
    close(found, [[-math.sqrt(0.5), 0, math.sqrt(0.5), 0]], 1e-7)


def test_whiten_of_none_and_of_one():
    assert whiten(row([3, 4]), tensor([[False, False]])).tolist() == [[0, 0]]
    assert whiten(row([3, 4]), tensor([[False, True]])).tolist() == [[0, 0]]


# GAE over turns ---------------------------------------------------------------------------------------------------

# Three turns of two tokens, an observation token after the first two; rewards on each second token.
TURN_OWN = [True, True, False, True, True, False, True, True]
TURN_REWARDS = [0, 0.105, 0, 0, 0.03, 0, 0, 1.2]


@pytest.mark.parametrize("case", golden("pica", "Advantages over turns"))
def test_turn_golden(case):
    values = row([0.3, 9, 9, 0.4, 9, 9, 0.5, 9])
    advantages, targets = turn_gae(row(TURN_REWARDS), values, tensor([TURN_OWN]), case["gamma"], case["lam"])
    first, second, third = case["advantages of turns"]
    close(advantages, [[first, first, 0, second, second, 0, third, third]])
    close(targets, [[first + 0.3, first + 0.3, 0, second + 0.4, second + 0.4, 0, third + 0.5, third + 0.5]])


@pytest.mark.parametrize("case", golden("pica", "Advantages over turns"))
def test_what_pica_trains_is_the_estimate_itself(case):
    """Not whitened: the middle of these advantages would get another sign."""
    values = row([0.3, 9, 9, 0.4, 9, 9, 0.5, 9])
    experience = experience_of(row(TURN_REWARDS), tensor([TURN_OWN]), values=values)
    found = TokenGae(case["gamma"], case["lam"], 0.0, "none", "turn")(experience)
    first, second, third = case["advantages of turns"]
    close(found.advantages, [[first, first, 0, second, second, 0, third, third]])


def test_turn_golden_token_level():
    """The same episode by tokens: 1.035, .985, .83, .78, .7, .65."""
    found, _ = gae(
        row([0, 0.105, 0, 0.03, 0, 1.2]), row([0.3, 0.35, 0.4, 0.45, 0.5, 0.55]), tensor([[True] * 6]), 1.0, 1.0
    )
    close(found, [[1.035, 0.985, 0.83, 0.78, 0.7, 0.65]])


def slow_turns(rewards, values, own, gamma, lam):
    """Turn by turn: list the turns, then add up their deltas."""
    starts = [t for t, mine in enumerate(own) if mine and (t == 0 or not own[t - 1])]
    if not starts:
        return [0.0] * len(own), [0.0] * len(own)
    last = max(t for t, mine in enumerate(own) if mine) + 1
    edges = [*starts, last]
    per_turn = [sum(rewards[edges[k] : edges[k + 1]]) for k in range(len(starts))]
    baseline = [values[start] for start in starts] + [0.0]
    deltas = [per_turn[k] + gamma * baseline[k + 1] - baseline[k] for k in range(len(starts))]
    advantages, targets = [0.0] * len(own), [0.0] * len(own)
    for k, start in enumerate(starts):
        advantage = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(starts)))
        for t in range(start, edges[k + 1]):
            if own[t]:
                advantages[t], targets[t] = advantage, advantage + baseline[k]
    return advantages, targets


@many
@given(batches(), units, units)
def test_turn_gae_agrees_with_the_slow_one(batch, gamma, lam):
    rewards, values, own = batch
    found = turn_gae(tensor(rewards, dtype=F64), tensor(values, dtype=F64), tensor(own), gamma, lam)
    for i, mine in enumerate(own):
        expected = slow_turns(rewards[i], values[i], mine, gamma, lam)
        for have, want in zip(found, expected, strict=True):
            assert have[i].tolist() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("rubbish", [7.0, math.inf, math.nan])
def test_turn_gae_reads_no_value_off_the_turns_first_tokens(rubbish):
    values = [rubbish] * 10
    for place, value in ((0, 0.3), (3, 0.4), (6, 0.5)):
        values[place] = value
    rewards = [*TURN_REWARDS, rubbish, rubbish]
    found, _ = turn_gae(row(rewards), row(values), tensor([[*TURN_OWN, False, False]]), 1.0, 1.0)
    close(found, [[1.035, 1.035, 0, 0.83, 0.83, 0, 0.7, 0.7, 0, 0]])


@pytest.mark.parametrize("turn", range(3))
def test_each_turns_kl_lands_on_that_turn(turn):
    """The sum of k1 over the turn's own tokens, 0.5 + 0.25, is taken from its reward and so from all turns up to it."""
    place = 3 * turn
    old, ref = torch.zeros(1, 8), torch.zeros(1, 8)
    old[0, place : place + 2] = tensor([-1.0, -0.5])
    ref[0, place : place + 2] = tensor([-1.5, -0.75])
    ref[0, [2, 5]] = -7.0  # Observations have no KL.
    experience = Experience(
        torch.ones(1, 8, dtype=torch.long), tensor([8]), torch.ones(1, 8, dtype=torch.bool), tensor([TURN_OWN]),
        tensor([TURN_REWARDS]), ("g",), torch.zeros(1, 8), old, ref, tensor([[0.3, 9, 9, 0.4, 9, 9, 0.5, 9]]),
    )  # fmt: skip
    returns = TokenGae(1.0, 1.0, 0.1, per="turn")(experience).returns
    without = TokenGae(1.0, 1.0, 0.0, per="turn")(experience).returns
    assert returns is not None
    penalty = [0.075 * (k <= turn) for k in range(3)]
    a, b, c = penalty
    close(without - returns, [[a, a, 0, b, b, 0, c, c]])
    # With lam = gamma = 0 nothing is handed back: the turn itself pays, and no other.
    alone = [TokenGae(0.0, 0.0, weight, per="turn")(experience).returns for weight in (0.0, 0.1)]
    assert alone[0] is not None
    only = [0.075 * (k == turn) for k in range(3) for _ in range(2)]
    close((alone[0] - alone[1])[:, TURN_OWN], [only])


def test_turn_gae_of_a_batch_without_generated_tokens_is_zero():
    advantages, targets = turn_gae(row([1, 1]), row([0.5, 0.5]), tensor([[False, False]]), 1.0, 1.0)
    assert advantages.tolist() == targets.tolist() == [[0.0, 0.0]]
