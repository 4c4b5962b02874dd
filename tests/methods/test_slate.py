"""SLATE against its golden values, and against a slow implementation from the paper, which uses lists alone."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.generate import Sampling
from tasks.rewards import on_turns
from tasks.rl.advantages.group import GroupAdvantage, group_normalized
from tasks.rl.advantages.own_reward import OwnReward
from tasks.rl.experience import Experience, collate
from tasks.rl.losses import LossSum, Normalizer
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.train.variance import measure
from tasks.types import Question, Sample, Scores, Trajectory
from tests.papers import column, golden
from tests.tiny import Script, make_player, make_tokenizer, question

POLICY = PolicyClip(0.2, 0.2, "token", "question_mean", None)


def near(values: Any, abs: float = 1e-6) -> Any:
    return pytest.approx(values, abs=abs)


# A slow implementation: plain lists, one formula a function -----------------------------------------------------------


def slow_advantages(rewards: Sequence[float], deviation: str, eps: float = 1e-6) -> list[float]:
    mean = sum(rewards) / len(rewards)
    count = len(rewards) - (deviation == "sample")
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / count)
    return [(reward - mean) / (std + eps) for reward in rewards]


def slow_candidate(logprobs: Sequence[float], old: Sequence[float], advantage: float, clip: float = 0.2) -> float:
    terms = []
    for new, before in zip(logprobs, old, strict=True):
        ratio = math.exp(new - before)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        terms.append(min(ratio * advantage, clipped * advantage))
    return sum(terms) / len(terms)


def slow_kl(logprobs: Sequence[Sequence[float]], ref: Sequence[Sequence[float]]) -> float:
    """Mean over all tokens of a step's candidates."""
    terms = [
        math.exp(other - new) - (other - new) - 1
        for of_candidate, others in zip(logprobs, ref, strict=True)
        for new, other in zip(of_candidate, others, strict=True)
    ]
    return sum(terms) / len(terms)


def slow_objective(questions: Sequence[Sequence[Sequence[dict[str, Any]]]], beta: float) -> float:
    """Mean over questions of the sum over steps of (mean over candidates of J - beta * KL)."""
    total = 0.0
    for steps in questions:
        for step in steps:
            advantages = slow_advantages([c["reward"] for c in step], "population")
            total += sum(
                slow_candidate(c["logprobs"], c["old"], advantage)
                for c, advantage in zip(step, advantages, strict=True)
            ) / len(step)
            total -= beta * slow_kl([c["logprobs"] for c in step], [c["ref"] for c in step])
    return total / len(questions)


# Golden values --------------------------------------------------------------------------------------------------------


def test_golden_advantages() -> None:
    for row in golden("slate", "Candidates"):
        rewards = [2.0, 1.0, 2.05, -1.0, 0.0]
        ours = group_normalized(torch.tensor(rewards, dtype=torch.double), ["g"] * 5, 1e-6, row["deviation"])
        assert ours.tolist() == near(row["advantages"])
        assert slow_advantages(rewards, row["deviation"]) == near(row["advantages"])


def test_golden_spread_by_the_bonus() -> None:
    for row in golden("slate", "Spread by the bonus"):
        scores = torch.tensor(row["rewards"], dtype=torch.double)
        assert group_normalized(scores, ["g"] * 5, 1e-6, row["deviation"]).tolist() == near(row["advantages"])


def one_group(candidates: Sequence[dict[str, Any]], question: str = "q", group: str = "g") -> list[Sample]:
    weight = 1 / len(candidates)
    return [
        Sample(question, group, (1,), (2,) * len(c["old"]), (True,) * len(c["old"]), tuple(c["old"]), weight)
        for c in candidates
    ]


def batch_of(samples: Sequence[Sample], candidates: Sequence[dict[str, Any]]) -> tuple[Experience, torch.Tensor]:
    """The experience and the current log-probabilities of these candidates."""
    scores = [Scores(0.0, ((len(c["old"]) - 1, c["reward"]),)) for c in candidates]
    batch = collate(samples, scores)

    def table(key: str) -> torch.Tensor:
        values = torch.zeros(batch.rewards.shape, dtype=torch.double)
        for row, candidate in enumerate(candidates):
            values[row, 1 : 1 + len(candidate[key])] = torch.tensor(candidate[key], dtype=torch.double)
        return values

    batch = replace(batch, old_logprobs=table("old"), ref_logprobs=table("ref"), rewards=batch.rewards.double())
    return batch, table("logprobs")


def loss_of(part: Any, batch: Experience, logprobs: torch.Tensor) -> float:
    normalizer = Normalizer.of(batch.loss_mask, batch.question_ids)
    return float(part(batch, logprobs, torch.zeros_like(logprobs), normalizer)[0])


def test_golden_objective_of_a_candidate() -> None:
    logprobs, old = [-0.9, -1.1, -0.4, -2.0], [-1.0, -1.0, -0.7, -2.0]
    for row in golden("slate", "Objective of a candidate"):
        assert slow_candidate(logprobs, old, row["A"]) == near(row["J"])
        candidate = {"old": old, "logprobs": logprobs, "ref": old, "reward": 0.0}
        batch, table = batch_of(one_group([candidate]), [candidate])
        batch = replace(batch, advantages=row["A"] * batch.loss_mask.double())
        assert -loss_of(POLICY, batch, table) == near(row["J"])


def test_golden_sum_over_steps() -> None:
    """One token a candidate and a ratio of 1, so that the objective of a candidate is its advantage."""
    for row in golden("slate", "Sum over steps"):
        alike = {"old": [-1.0], "logprobs": [-1.0], "ref": [-1.0], "reward": 0.0}
        steps = row["J of each step"]
        samples = [s for number, step in enumerate(steps) for s in one_group([alike] * len(step), "q", f"g{number}")]
        batch, table = batch_of(samples, [alike] * len(samples))
        wanted = torch.tensor([value for step in steps for value in step], dtype=torch.double)
        batch = replace(batch, advantages=wanted[:, None] * batch.loss_mask)
        assert -loss_of(POLICY, batch, table) == near(row["objective"])


def by_word(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    """1 for an action with the first of two words, -1 for one with the other."""
    return [
        on_turns(t, {i: 1.0 if "Avenor" in turn.text else -1.0 for i, turn in enumerate(t.turns)}) for t in trajectories
    ]


def signs(numbers: Iterable[int], row: int) -> list[str]:
    """In a row of a Hadamard matrix, the words of these columns.

    Over all its rows each column has mean 0 and variance 1, and no two columns are correlated.
    """
    return ["Avenor" if (row & number).bit_count() % 2 == 0 else "Bristow" for number in numbers]


def actions_of(words: Sequence[str]) -> list[str]:
    """A play of as many actions; the last one answers."""
    return [*(f"<search> {word} </search>" for word in words[:-1]), f"<answer> {words[-1]} </answer>"]


def test_golden_variance() -> None:
    """32 questions whose rewards have exactly the theorem's moments: 5 times 4 uncorrelated ones of variance 1."""
    k, num_steps, count = 5, 4, 32
    plays = [[signs(range(1 + 4 * i, 5 + 4 * i), row) for i in range(k)] for row in range(count)]
    candidates = [
        [actions_of(plays[row][i])[step]] for step in range(num_steps) for row in range(count) for i in range(k)
    ]
    lines: list[list[str | list[int]]] = [[] for _ in range(count)] + [list(line) for line in candidates]
    for row in range(count):
        for i in range(2 * k):
            lines[row * 2 * k + i] += actions_of(plays[row][i % k])

    tokenizer = make_tokenizer()
    budgets = {"max_turns": num_steps - 1, "batch_rows": 2 * k * count, "max_total_tokens": 900}
    player = make_player(Script(tokenizer, lines), tokenizer, **budgets)
    sampling = Sampling(1.0, 1.0, (), 0)
    rows = measure("start", player, by_word, [question(i) for i in range(count)], k, sampling)

    variance = column("slate", "Variance", "advantage", "variance")
    assert (variance["step"], variance["trajectory"]) == (near(1 - 1 / k), near((1 - 1 / k) * num_steps))
    for turn in range(num_steps + 1):
        own = [row for row in rows if row.turn == turn]
        assert len(own) == count
        assert statistics.fmean(row.truncated for row in own) == near(variance["step"])
        assert statistics.fmean(row.full for row in own) == near(variance["trajectory"])
        assert [(row.num_turns, row.group) for row in own] == [(num_steps, k)] * count
        assert [row.full_at_tokens for row in own] == [row.full for row in own]


# Both implementations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_loss_is_that_of_the_slow_implementation(seed: int) -> None:
    """Questions of different numbers of steps, candidates of different lengths, a KL term once a step."""
    rng = random.Random(seed)

    def candidate() -> dict[str, Any]:
        size = rng.randint(1, 5)
        # Distances below 2: the estimate of the KL is cut off at 10.
        draws = {key: [-rng.random() * 2 for _ in range(size)] for key in ("old", "logprobs", "ref")}
        return {**draws, "reward": rng.choice([-2.0, -1.0, 0.0, 1.05, 2.0])}

    questions = [[[candidate() for _ in range(3)] for _ in range(rng.randint(1, 4))] for _ in range(3)]
    samples, flat = [], []
    for number, steps in enumerate(questions):
        for t, step in enumerate(steps):
            samples += one_group(step, f"q{number}", f"q{number}/{t}")
            flat += step
    batch, logprobs = batch_of(samples, flat)
    batch = GroupAdvantage(1e-6, "population")(batch)
    loss = LossSum((POLICY, ReferenceKl(0.05, "question_mean")))
    assert -loss_of(loss, batch, logprobs) == near(slow_objective(questions, 0.05), 1e-5)

    # A mini-batch that is cut into micro-batches has the same loss, if they divide by the whole mini-batch.
    normalizer = Normalizer.of(batch.loss_mask, batch.question_ids)
    parts = [list(range(start, min(start + 4, len(batch)))) for start in range(0, len(batch), 4)]
    width = [int(batch.lengths[rows].max()) for rows in parts]
    pieces = [
        float(loss(batch.rows(rows), logprobs[rows, :wide], torch.zeros(len(rows), wide), normalizer)[0])
        for rows, wide in zip(parts, width, strict=True)
    ]
    assert -sum(pieces) == near(slow_objective(questions, 0.05), 1e-5)


def test_one_candidate_keeps_its_reward() -> None:
    candidate = {"old": [-1.0, -1.0], "logprobs": [-1.0, -1.0], "ref": [-1.0, -1.0], "reward": 1.5}
    batch, _ = batch_of(one_group([candidate]), [candidate])
    advantages = OwnReward()(batch).advantages
    assert advantages is not None
    assert advantages.tolist() == [[0.0, 1.5, 1.5]]


def test_a_mean_over_questions_needs_their_number() -> None:
    candidate = {"old": [-1.0], "logprobs": [-1.0], "ref": [-1.0], "reward": 1.0}
    batch, table = batch_of(one_group([candidate]), [candidate])
    batch = replace(batch, advantages=batch.rewards)
    with pytest.raises(ValueError, match="questions=0: expected 1 or more"):
        POLICY(batch, table, table, Normalizer.of(batch.loss_mask))
