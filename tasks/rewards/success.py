"""What a reward model says of trajectories, checked before a reward is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.services import Probabilities, ServiceError, Services
from tasks.services.numbers import check_list, check_probabilities
from tasks.types import Question, Trajectory

_SERVICE = "services: reward_model"


def probabilities(
    services: Services, trajectories: Sequence[Trajectory], questions: Sequence[Question], max_missing_share: float
) -> list[Probabilities]:
    """The service's probabilities, one entry for each trajectory.

    Raises:
        ServiceError: the reward model cannot answer now, or a larger share of the searches has no score.
        ValueError: it does not return a probability or null for each turn of each trajectory.
    """
    found = services["reward_model"].probabilities(trajectories, questions)
    check_list(found, len(trajectories), _SERVICE, "trajectory")
    for trajectory, one in zip(trajectories, found, strict=True):
        where = f"{_SERVICE}: question {trajectory.question_id!r}"
        check_probabilities([one.before, *one.after], len(trajectory.turns) + 1, where)
    _check_share(trajectories, found, max_missing_share)
    return found


def num_missing(trajectory: Trajectory, found: Probabilities) -> int:
    """Searches without a score; turns that searched nothing have none by design."""
    return sum(turn.executed and f is None for turn, f in zip(trajectory.turns, found.after, strict=True))


def _check_share(trajectories: Sequence[Trajectory], found: Sequence[Probabilities], most: float) -> None:
    """Raise the ServiceError for too many searches without a score, which would all earn 0."""
    missing = sum(map(num_missing, trajectories, found))
    searched = sum(turn.executed for trajectory in trajectories for turn in trajectory.turns)
    if missing > most * searched:
        raise ServiceError(
            f"{_SERVICE}: found no score for {missing} of {searched} searches, expected at most a share of {most:g} "
            "(max_missing_share of the reward). Raise max_tokens of the model in conf/reward_model/, play shorter "
            "trajectories, or mend the model's server."
        )
