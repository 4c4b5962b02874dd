"""Samples: which part of a trajectory is trained, what its weight does, and draws that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import Experience, collate
from tasks.rl.losses import LossSum, Normalizer
from tasks.rl.losses.imitation import Imitation
from tasks.rl.samplers import Draw, draw_of_trajectories
from tasks.rl.samples import sample_from, scores_from, whole_trajectories
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tasks.types import Note, Sample, Scores, Trajectory
from tests.tiny import make_loss, question

MASK = (True, True, False, False, True, True, True)
PLAYED = Trajectory(
    "q0", "g", (7, 8), (1, 2, 3, 4, 5, 6, 9), MASK, (-1.0, -2.0, 0.0, 0.0, -3.0, -4.0, -5.0), (), "open"
)


def test_a_trajectory_is_one_sample() -> None:
    (sample,) = whole_trajectories([PLAYED])
    assert sample == Sample("q0", "g", (7, 8), PLAYED.response_ids, MASK, PLAYED.sampler_logprobs, 1.0)


def test_a_candidate_is_trained_and_its_prefix_is_not() -> None:
    """The policy wrote both turns; of the candidate for the second one only that is trained, compared and rewarded."""
    sample = sample_from(PLAYED, 4, "q0/turn 1")
    scores = scores_from(Scores(1.5, ((1, 0.5), (6, 1.0)), {"em": 1.0}), 4)
    batch = collate([sample], [scores])
    assert batch.ids.tolist() == [[7, 8, 1, 2, 3, 4, 5, 6, 9]]
    assert batch.lengths.tolist() == [9]
    assert batch.loss_mask.tolist() == batch.response_mask.tolist() == [[False] * 6 + [True] * 3]
    assert batch.rewards.tolist() == [[0.0] * 8 + [1.0]]
    assert batch.sampler_logprobs.tolist() == [[0.0] * 6 + [-3.0, -4.0, -5.0]]
    assert batch.group_ids == ("q0/turn 1",)
    advantages = GroupAdvantage()(collate([sample, sample], [scores, Scores(0.0, ())])).advantages
    assert advantages is not None
    assert advantages[0].nonzero()[:, 0].tolist() == [6, 7, 8]


def test_a_sample_keeps_the_notes_and_what_is_trained_ignores_them() -> None:
    noted = Scores(1.5, ((1, 0.5), (6, 1.0)), {"em": 1.0}, (Note(0, "f", 0.25), Note(1, "f", 0.75)))
    found, plain = scores_from(noted, 4), scores_from(replace(noted, notes=()), 4)
    assert found.notes == noted.notes
    sample = sample_from(PLAYED, 4, "q0/turn 1")
    assert torch.equal(collate([sample], [found]).rewards, collate([sample], [plain]).rewards)


def test_an_observation_inside_a_sample_is_not_trained() -> None:
    batch = collate([sample_from(PLAYED, 1, "g")], [Scores(0.0, ())])
    assert batch.response_mask[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.loss_mask[0].nonzero()[:, 0].tolist() == [3, 6, 7, 8]


# Weights ----------------------------------------------------------------------------------------------------------


def experience(weights: tuple[float, float]) -> Experience:
    """Two samples of unequal length, with all that a loss reads."""
    samples = [sample_from(PLAYED, 0, "g", weights[0]), sample_from(PLAYED, 4, "g", weights[1])]
    batch = collate(samples, [Scores(1.0, ((2, 1.0),)), Scores(0.0, ())])
    noise = torch.Generator().manual_seed(0)
    old, ref, values, returns = (-torch.rand(batch.ids.shape, generator=noise) for _ in range(4))
    return GroupAdvantage()(replace(batch, old_logprobs=old, ref_logprobs=ref, values=values, returns=returns))


LOSSES = {
    "token": make_loss(kl_coefficient=0.1, entropy_coefficient=0.1),
    "seq_mean": make_loss(aggregation="seq_mean", kl_coefficient=0.1, entropy_coefficient=0.1),
    "sequence": make_loss(3.0e-1, 0.4, "seq_mean", ratio="sequence"),
    "imitation": LossSum((Imitation(),)),
    "value": ClippedValueLoss(0.5),
}


def gradient(loss: Any, batch: Experience) -> tuple[float, Tensor]:
    outputs = -torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(1))
    outputs.requires_grad_()
    normalizer = Normalizer.of(batch.loss_mask)
    if isinstance(loss, ClippedValueLoss):
        value = loss(batch, outputs, normalizer)
    else:
        value, _ = loss(batch, outputs, outputs * 2, normalizer)
    value.backward()
    assert outputs.grad is not None
    return value.item(), outputs.grad


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_scales_the_gradient_of_its_sample_alone(name: str) -> None:
    _, plain = gradient(LOSSES[name], experience((1.0, 1.0)))
    value, weighted = gradient(LOSSES[name], experience((0.25, 3.0)))
    assert plain[0].any()
    assert plain[1].any()
    torch.testing.assert_close(weighted[0], 0.25 * plain[0])
    torch.testing.assert_close(weighted[1], 3.0 * plain[1])
    first, second = (gradient(LOSSES[name], experience(weights))[0] for weights in ((0.25, 0.0), (0.0, 3.0)))
    assert value == pytest.approx(first + second, abs=1e-6)


def test_weights_of_one_multiply_nothing() -> None:
    assert experience((1.0, 1.0)).weights is None
    weights = experience((1.0, 2.0)).weights
    assert weights is not None
    assert weights.tolist() == [1.0, 2.0]
    kept = experience((1.0, 2.0)).rows([1]).weights
    assert kept is not None
    assert kept.tolist() == [2.0]


# Draws ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_learned_from_is_lost() -> None:
    """A failed trajectory, the one it leaves alone in its group, and an empty one; nothing of them is scored."""
    others = [replace(PLAYED, group_id="h"), replace(PLAYED, group_id="h", status="failed")]
    empty = replace(PLAYED, loss_mask=(False,) * 7)
    played = [PLAYED, PLAYED, empty, *others]
    scored: list[int] = []

    def score(trajectories: Any, questions: Any) -> list[Scores]:
        scored.append(len(trajectories))
        assert [q.id for q in questions] == ["q0"] * len(trajectories)
        return [Scores(0.0, ())] * len(trajectories)

    draw = draw_of_trajectories(played, 2, [question(0)], score)
    assert (len(draw.trajectories), len(draw.samples), list(draw.owners)) == (2, 2, [0, 1])
    assert list(draw.lost) == [empty, *others]
    nothing = draw_of_trajectories([empty], 1, [question(0)], score)
    assert (list(nothing.samples), list(nothing.lost)) == ([], [empty])
    assert scored == [2]


def test_draws_that_do_not_fit_together() -> None:
    samples = whole_trajectories([PLAYED, PLAYED])
    with pytest.raises(ValueError, match="2 samples, 1 scores and 2 owners, expected one score and one owner"):
        Draw([PLAYED], samples, [Scores(0.0, ())], [0, 0])
    with pytest.raises(ValueError, match="2 samples but no trajectory"):
        Draw([], samples, [Scores(0.0, ())] * 2, [None, None])
