"""What a reward model says of trajectories, checked before a reward is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.services import Probabilities, Services
from tasks.services.numbers import check_list, check_probabilities
from tasks.types import Question, Trajectory

_SERVICE = "services: reward_model"


def probabilities(
    services: Services, trajectories: Sequence[Trajectory], questions: Sequence[Question]
) -> list[Probabilities]:
    """The service's probabilities, one entry for each trajectory.

    Raises:
        ServiceError: the reward model cannot answer now; the step fails.
        ValueError: it does not return a probability or null for each turn of each trajectory.
    """
    found = services["reward_model"].probabilities(trajectories, questions)
    check_list(found, len(trajectories), _SERVICE, "trajectory")
    for trajectory, one in zip(trajectories, found, strict=True):
        where = f"{_SERVICE}: question {trajectory.question_id!r}"
        check_probabilities([one.before, *one.after], len(trajectory.turns) + 1, where)
    return found
