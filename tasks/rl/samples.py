"""Cuts samples from trajectories: which of its tokens are trained, and which of its rewards lie on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tasks.conf import require
from tasks.types import Sample, Scores, Trajectory


def whole_trajectories(trajectories: Sequence[Trajectory]) -> list[Sample]:
    """Each trajectory as one sample: the prompt is its context, all that the policy wrote is trained."""
    return [sample_from(trajectory, 0, trajectory.group_id) for trajectory in trajectories]


def sample_from(trajectory: Trajectory, start: int, group_id: str, weight: float = 1.0) -> Sample:
    """The trajectory from response token `start` on; all before it is context.

    Raises:
        ValueError: the response has no such token.
    """
    size = len(trajectory.response_ids)
    require(0 <= start <= size, "start", start, f"0 to {size}, a place in the response")
    return Sample(
        question_id=trajectory.question_id,
        group_id=group_id,
        prefix_ids=trajectory.prompt_ids + trajectory.response_ids[:start],
        ids=trajectory.response_ids[start:],
        trained=trajectory.loss_mask[start:],
        sampler_logprobs=trajectory.sampler_logprobs[start:],
        weight=weight,
    )


def scores_from(scores: Scores, start: int) -> Scores:
    """The scores of the sample that begins at response token `start`; rewards before it are left out.

    Notes are kept whole, because they name turns of the trajectory.

    >>> scores_from(Scores(1.0, ((2, 0.5), (7, 1.0)), {"em": 1.0}), 5)
    Scores(outcome=1.0, placed=((2, 1.0),), components={'em': 1.0}, notes=())
    """
    placed = tuple((position - start, value) for position, value in scores.placed if position >= start)
    return replace(scores, placed=placed)


def whole_groups(trajectories: Sequence[Trajectory], size: int) -> list[Trajectory]:
    """The trajectories that still have another member of their group.

    Failed searches can leave one trajectory of a group. It has nothing to be compared with, so it is dropped. Groups of
    `size` 1 are kept as they are.
    """
    members = Counter(t.group_id for t in trajectories)
    return [t for t in trajectories if size == 1 or members[t.group_id] > 1]
