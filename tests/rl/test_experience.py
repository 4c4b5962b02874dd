"""Trajectories as tensors: positions, padding, rows, and the division into mini- and micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.experience import (
    Experience,
    collate,
    microbatches,
    minibatches,
    question_minibatches,
    shared_microbatches,
)
from tasks.rl.samples import whole_trajectories
from tasks.types import Sample, Scores, Trajectory

many = settings(max_examples=150)


@st.composite
def played(draw: st.DrawFn) -> list[tuple[Trajectory, Scores]]:
    rows = []
    for number in range(draw(st.integers(1, 5))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=7))
        prompt = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        ids = draw(st.lists(st.integers(1, 9), min_size=len(mask), max_size=len(mask)))
        logprobs = tuple(-0.5 * own for own in mask)
        places = draw(st.lists(st.tuples(st.integers(0, len(mask) - 1), st.sampled_from([0.5, 1.0, -2.0])), max_size=3))
        rows.append((
            Trajectory(f"q{number}", f"g{number}", tuple(prompt), tuple(ids), tuple(mask), logprobs, (), "open"),
            Scores(sum(v for _, v in places), tuple(places)),
        ))  # fmt: skip
    return rows


@many
@given(played())
def test_every_entry_stands_at_its_token(rows: list[tuple[Trajectory, Scores]]) -> None:
    batch = collate(whole_trajectories([t for t, _ in rows]), [s for _, s in rows])
    for i, (t, score) in enumerate(rows):
        start, stop = len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)
        assert batch.lengths[i] == stop
        assert batch.ids[i, :stop].tolist() == [*t.prompt_ids, *t.response_ids]
        assert not batch.ids[i, stop:].any()
        assert batch.response_mask[i].nonzero()[:, 0].tolist() == list(range(start, stop))
        assert batch.loss_mask[i].nonzero()[:, 0].tolist() == [start + j for j, own in enumerate(t.loss_mask) if own]
        assert batch.sampler_logprobs[i, start:stop].tolist() == list(t.sampler_logprobs)
        for j in range(len(t.response_ids)):
            assert batch.rewards[i, start + j] == sum(v for place, v in score.placed if place == j)  # they add up
        assert float(batch.rewards[i].sum()) == pytest.approx(score.outcome)
    assert batch.group_ids == tuple(t.group_id for t, _ in rows)


@many
@given(played(), st.data())
def test_rows_are_those_of_a_smaller_collate(rows: list[tuple[Trajectory, Scores]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    part = collate(whole_trajectories([t for t, _ in rows]), [s for _, s in rows]).rows(index)
    wanted = collate(whole_trajectories([rows[i][0] for i in index]), [rows[i][1] for i in index])
    for name in ("ids", "lengths", "response_mask", "loss_mask", "rewards", "sampler_logprobs"):
        assert torch.equal(getattr(part, name), getattr(wanted, name)), name
    assert part.group_ids == wanted.group_ids
    assert part.old_logprobs is None


def test_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="no sample to train on"):
        collate([], [])


@many
@given(st.integers(1, 40), st.integers(1, 9), st.text(max_size=3))
def test_minibatches_are_a_seeded_partition(rows: int, count: int, seed: str) -> None:
    found = minibatches(rows, count, seed)
    assert sorted(i for part in found for i in part) == list(range(rows))
    assert len(found) == min(rows, count)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert found == minibatches(rows, count, seed)


def test_minibatches_differ_by_seed() -> None:
    assert minibatches(20, 2, "0/minibatch/1") != minibatches(20, 2, "0/minibatch/2")


def of_questions(questions: list[int]) -> Experience:
    """Samples of these questions, in groups of two; of three tokens each the middle one is an observation."""
    samples = [
        Sample(f"q{number}", f"g{i // 2}", (1,) * (1 + number), (2, 3, 4), (True, False, True), (-1.0, 0.0, -1.0))
        for i, number in enumerate(questions)
    ]
    return collate(samples, [Scores(0.0, ())] * len(samples))


@many
@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 9))
def test_minibatches_of_questions_keep_all_rows_of_a_question_together(questions: list[int], count: int) -> None:
    found = question_minibatches(of_questions(questions), count, "seed")
    assert sorted(i for part in found for i in part) == list(range(len(questions)))
    of_part = [{questions[i] for i in part} for part in found]
    assert len(of_part) == min(count, len(set(questions)))
    assert sum(map(len, of_part)) == len(set(questions))  # No question is in two of them.
    assert max(map(len, of_part)) - min(map(len, of_part)) <= 1
    assert found == question_minibatches(of_questions(questions), count, "seed")


def test_minibatches_of_questions_differ_by_seed() -> None:
    many_questions = of_questions(list(range(20)))
    assert question_minibatches(many_questions, 2, "1") != question_minibatches(many_questions, 2, "2")


@many
@given(st.lists(st.integers(0, 6), min_size=2, max_size=24), st.integers(1, 30), st.data())
def test_shared_microbatches_divide_the_rows_they_are_given(
    questions: list[int], budget: int, data: st.DataObject
) -> None:
    """A prefix of 1 + q tokens counts once in a micro-batch, each sample's own 3 always."""
    experience = of_questions(questions)
    rows = data.draw(st.lists(st.integers(0, len(questions) - 1), min_size=1, unique=True))
    found = shared_microbatches(experience, rows, budget)
    assert sorted(i for part in found for i in part) == sorted(rows)
    for part in found:
        size = 3 * len(part) + sum(1 + number for number in {questions[i] for i in part})
        assert size <= budget or len(part) == 1
    whole = 3 * len(rows) + sum(1 + number for number in {questions[i] for i in rows})
    assert len(found) == 1 or whole > budget


def test_tokens_of_a_group_are_the_trained_ones_of_its_samples() -> None:
    experience = of_questions([0, 0, 0])
    assert experience.group_tokens is not None
    assert experience.group_tokens.tolist() == [4, 4, 2]


@many
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.data())
def test_microbatches_keep_the_token_budget(lengths: list[int], budget: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    found = microbatches(lengths, rows, budget)
    assert sorted(i for part in found for i in part) == sorted(rows)
    for part in found:
        width = max(lengths[i] for i in part)
        assert len(part) == 1 or len(part) * width <= budget
        assert width <= 2 * min(lengths[i] for i in part)  # length buckets: padding is less than half
    assert found == microbatches(lengths, rows[::-1], budget)  # in whatever order the rows come
