"""What the rewards of a method give to trajectories: each reward is called once, and what it returns is checked."""

from __future__ import annotations

from collections.abc import Sequence

from tasks import parts
from tasks.conf import is_trainable, require
from tasks.rewards import Reward
from tasks.services import ServiceError, Services
from tasks.store import DataError
from tasks.types import Note, Question, Scores, Trajectory


def scores_by_reward(
    rewards: Sequence[Reward], trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services
) -> list[list[Scores]]:
    """The scores of each reward, in order, one a trajectory.

    Raises:
        ValueError: a reward broke off, or returned something else than finite scores on tokens of the trajectories;
            names the reward, its file and the line where its code broke off.
    """
    given = []
    for reward in rewards:
        where = f"rewards: {parts.kind_of(reward)}"
        scores = _called(reward, where, trajectories, questions, services)
        _require_scores(reward, where, scores, trajectories, questions)
        given.append(scores)
    return given


def _called(
    reward: Reward, where: str, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services
) -> list[Scores]:
    try:
        return reward(trajectories, questions, services)
    except (ServiceError, DataError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = parts.place_of(error, type(reward))
        if isinstance(error, ValueError | RuntimeError) and not parts.arose_in(error, type(reward)):
            raise  # Of a model or a service, in its own words.
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise ValueError(f"{where}: {place}: {type(error).__name__}: {error}{notes}. Mend that file.") from error


def _require_scores(
    reward: Reward, where: str, scores: object, trajectories: Sequence[Trajectory], questions: Sequence[Question]
) -> None:
    """Raise the ValueError for a reward that does not give finite scores on tokens, one for each trajectory."""
    mend = f"; mend {parts.file_of(type(reward))}"
    declared = f"one of its components {reward.components!r}{mend}"
    require(isinstance(scores, list | tuple), f"{where}: scores", scores, f"a list of Scores, one a trajectory{mend}")
    assert isinstance(scores, list | tuple)
    require(
        len(scores) == len(questions), f"{where}: number of scores", len(scores), f"{len(questions)}, one each{mend}"
    )

    for score, trajectory, question in zip(scores, trajectories, questions, strict=True):
        place, size = f"{where}: score for question {question.id!r}", len(trajectory.response_ids)
        is_score = isinstance(score, Scores)
        require(is_score, place, score, f"Scores, such as on_last_token(trajectory, 1.0) returns{mend}")
        for name, kind, told in (
            ("placed", list | tuple, "pairs of token and value"),
            ("components", dict, "a dict of numbers by name"),
            ("notes", list | tuple, "a tuple of Note"),
        ):
            value = getattr(score, name)
            require(isinstance(value, kind), f"{place}: {name}", value, f"{told}{mend}")

        for note in score.notes:
            require(isinstance(note, Note), f"{place}: notes", note, f"a Note{mend}")
        for pair in score.placed:
            require(isinstance(pair, tuple) and len(pair) == 2, f"{place}: placed", pair, f"(token, value){mend}")

        for name in score.components:
            require(name in reward.components, f"{place}: component", name, declared)
        for value in (score.outcome, *(value for _, value in score.placed), *score.components.values()):
            require(is_trainable(value), place, value, f"a finite number{mend}")
        for position, _ in score.placed:
            is_token = isinstance(position, int) and 0 <= position < size
            require(is_token, f"{place}: token", position, f"0 to {size - 1}, a token of the trajectory{mend}")
