"""How good was it? One file per kind of reward; a method adds up the ones it names.

A reward maps a list of trajectories and their questions to `Scores`: values placed on tokens. It reads
the environment's record (turns, hits), never tags in observations, which a policy can forge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tasks.types import Question, Scores, Trajectory


class Reward(Protocol):
    """Scores a batch (so that a judge can be called once); unfinished trajectories are allowed."""

    def __call__(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]: ...


def on_last_token(trajectory: Trajectory, value: float, **parts: float) -> Scores:
    """An outcome reward: on the last token the policy wrote; nothing is placed where it wrote none."""
    last = trajectory.last_generated
    return Scores(value, ((last, value),) if last >= 0 else (), parts)


def total(scores: Sequence[Scores]) -> Scores:
    """The sum of several rewards of one trajectory; values at one token add up (methods README, decision 6)."""
    placed: dict[int, float] = {}
    parts: dict[str, float] = {}
    for score in scores:
        for position, value in score.placed:
            placed[position] = placed.get(position, 0.0) + value
        parts.update(score.parts)
    return Scores(sum(s.outcome for s in scores), tuple(sorted(placed.items())), parts)
