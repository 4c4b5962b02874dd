"""What is drawn for a step, one file for each way to draw it.

A sampler plays questions and says which samples can be learned from. A question, a prompt and a group are three things:
a step draws questions and its budget counts them; a generator reads a prompt once for several rows; the samples of a
group are compared with each other. With independent play a question is one group, with candidates for each turn every
turn is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.agent.rollout import Player
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

    @property
    def num_played(self) -> int:
        """Trajectories, lost ones included."""
        return len(self.trajectories) + len(self.lost)

    @property
    def num_failed(self) -> int:
        """Trajectories that ended with a failed search."""
        return sum(trajectory.status == "failed" for trajectory in self.lost)


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
