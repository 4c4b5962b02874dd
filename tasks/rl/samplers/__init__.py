"""What is drawn for a step, one file for each way to draw it.

A sampler plays questions and says which samples can be learned from. A question, a prompt and a group are three things:
a step draws questions and its budget counts them; a generator reads a prompt once for several rows; the samples of a
group are compared with each other. With independent play a question is one group, with candidates for each turn every
turn is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.agent.rollout import Player
from tasks.conf import is_trainable, require
from tasks.generate import Sampling
from tasks.rl.samples import whole_groups, whole_trajectories
from tasks.types import Question, Sample, Scores, Trajectory

Score = Callable[[Sequence[Trajectory], Sequence[Question]], list[Scores]]
"""The method's rewards of trajectories and their questions, added up; a trajectory may be unfinished."""


@dataclass(frozen=True)
class Draw:
    """What came of playing some questions.

    Attributes:
        trajectories: complete plays of the questions, in order; metrics describe these.
        samples: what can be learned from.
        scores: one per sample.
        owners: one per sample, the index of the trajectory it was cut from; None where it belongs to none of them.
        lost: trajectories that cannot be learned from: failed, empty, or left alone in their group.
    """

    trajectories: Sequence[Trajectory]
    samples: Sequence[Sample]
    scores: Sequence[Scores]
    owners: Sequence[int | None]
    lost: Sequence[Trajectory] = ()

    def __post_init__(self) -> None:
        counts = {len(self.samples), len(self.scores), len(self.owners)}
        if len(counts) > 1:
            raise ValueError(
                f"the sampler gave {len(self.samples)} samples, {len(self.scores)} scores and {len(self.owners)} "
                "owners, expected one score and one owner for each sample."
            )
        if self.samples and not self.trajectories:
            raise ValueError(f"the sampler gave {len(self.samples)} samples but no trajectory, which metrics describe.")
        for number, (sample, scores) in enumerate(zip(self.samples, self.scores, strict=True)):
            _check(f"the sampler's sample {number} (question {sample.question_id!r})", sample, scores)
        for number, owner in enumerate(self.owners):
            where, expected = f"the sampler's sample {number}: owner", f"None or 0 to {len(self.trajectories) - 1}"
            require(owner is None or 0 <= owner < len(self.trajectories), where, owner, expected)

    @property
    def num_played(self) -> int:
        """Trajectories, lost ones included."""
        return len(self.trajectories) + len(self.lost)

    @property
    def num_failed(self) -> int:
        """Trajectories that ended with a failed search."""
        return sum(trajectory.status == "failed" for trajectory in self.lost)


def _check(where: str, sample: Sample, scores: Scores) -> None:
    """Raise the ValueError for a sample that would be trained in another way than it says."""
    size = len(sample.ids)
    for name in ("trained", "sampler_logprobs"):
        found = len(getattr(sample, name))
        require(found == size, f"{where}: length of {name}", found, f"{size}, one entry for each token of ids")
    require(any(sample.trained), f"{where}: trained", "no token", "one or more; leave out a sample without any")
    require(is_trainable(sample.weight), f"{where}: weight", sample.weight, "a finite number")
    require(all(map(math.isfinite, sample.sampler_logprobs)), f"{where}: sampler_logprobs", "nan or inf", "numbers")
    for position, value in scores.placed:
        require(0 <= position < size, f"{where}: place of a reward", position, f"0 to {size - 1}, a token of ids")
        require(is_trainable(value), f"{where}: reward", value, "a finite number")


def draw_of_trajectories(
    played: Sequence[Trajectory], group_size: int, questions: Sequence[Question], score: Score
) -> Draw:
    """Each trajectory is one sample, unless it failed, is empty, or all others of its group are lost."""
    sound = [t for t in played if t.status != "failed" and t.num_generated]
    kept = whole_groups(sound, group_size)
    kept_objects = {id(trajectory) for trajectory in kept}
    by_id = {question.id: question for question in questions}
    return Draw(
        trajectories=kept,
        samples=whole_trajectories(kept),
        scores=score(kept, [by_id[t.question_id] for t in kept]) if kept else [],
        owners=range(len(kept)),
        lost=[trajectory for trajectory in played if id(trajectory) not in kept_objects],
    )


class Sampler(Protocol):
    """Draws the samples of some questions."""

    @property
    def size(self) -> int:
        """Rollouts of one question, which count towards a step's `rollouts_per_step`."""
        ...

    @property
    def from_start(self) -> bool:
        """Whether the start policy plays instead of the one under training."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether a generator drew the tokens; else the sampler logprobs are placeholders."""
        ...

    def draw(self, player: Player, questions: Sequence[Question], sampling: Sampling, score: Score) -> Draw:
        """Play these questions; `score` may be called at any time, also on unfinished trajectories.

        Group ids are unique within the draw.
        """
        ...
