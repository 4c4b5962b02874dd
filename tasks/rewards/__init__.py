"""Rewards of trajectories, one file for each kind; a method adds up the rewards that its YAML names.

A reward maps trajectories and their questions to `Scores`: values placed on tokens. It reads the environment's record
(turns, executed searches, hits) and what the policy wrote, never tags in observations, which a policy can forge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from tasks.services import NO_SERVICES, Role, Services
from tasks.types import Question, Scores, Trajectory

Field = Literal["decomposition", "queries", "gold_passages"]
"""What of a question a reward may read besides its text and answers: the stage `inputs` joins only what is read."""


class Reward(Protocol):
    """Scores a batch at once, so that a model behind a service gets one call; trajectories may be unfinished."""

    @property
    def reads(self) -> tuple[Field, ...]:
        """What of the questions it reads besides text and answers."""
        ...

    @property
    def services(self) -> tuple[Role, ...]:
        """The services it calls."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """The names in the `components` of its scores."""
        ...

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]: ...


class EachReward(ABC):
    """A `Reward` that looks at one trajectory at a time and calls no service."""

    @property
    def reads(self) -> tuple[Field, ...]:
        """Text and answers only, unless a reward says otherwise."""
        return ()

    @property
    def services(self) -> tuple[Role, ...]:
        """None."""
        return ()

    @property
    @abstractmethod
    def components(self) -> tuple[str, ...]:
        """See `Reward`."""

    @abstractmethod
    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """Rewards of this trajectory."""

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; an error of one of them says of which question it is."""
        found = []
        for trajectory, question in zip(trajectories, questions, strict=True):
            try:
                found.append(self.score(trajectory, question))
            except (Exception, SystemExit) as error:
                error.add_note(f"in a play of question {question.id!r}")
                raise
        return found


def on_last_token(trajectory: Trajectory, value: float, **components: float) -> Scores:
    """An outcome reward on the last token the policy wrote; nothing is placed where it wrote none."""
    last = trajectory.last_generated
    return Scores(value, ((last, value),) if last >= 0 else (), components)


def on_turns(trajectory: Trajectory, values: Mapping[int, float], **components: float) -> Scores:
    """Turn rewards, each on the token that completes its turn's action; they add nothing to the outcome.

    `values` maps turn numbers to rewards. A turn in which the policy wrote nothing (it ended the call at once) gets
    none.
    """
    turns = [(trajectory.turns[number], value) for number, value in sorted(values.items())]
    return Scores(0.0, tuple((turn.end - 1, value) for turn, value in turns if turn.end > turn.start), components)


def total(scores: Sequence[Scores]) -> Scores:
    """The sum of several rewards of one trajectory; values at one token add up, notes stand one after another."""
    placed: dict[int, float] = {}
    components: dict[str, float] = {}
    for score in scores:
        for position, value in score.placed:
            placed[position] = placed.get(position, 0.0) + value
        components.update(score.components)
    notes = tuple(note for score in scores for note in score.notes)
    return Scores(sum(s.outcome for s in scores), tuple(sorted(placed.items())), components, notes)
