"""How good was it? One file per kind of reward; a method adds up the ones it names.

A reward maps a list of trajectories and their questions to `Scores`: values placed on tokens. It reads
the environment's record (turns, hits), never tags in observations, which a policy can forge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tasks.types import Question, Scores, Trajectory

Need = Literal["decomposition", "queries", "gold_passages", "likelihood"]
Likelihood = Callable[[Sequence[tuple[Sequence[int], Sequence[int]]]], list[float]]
"""(context ids, continuation ids) pairs -> mean natural log-probability of each continuation's tokens."""


@dataclass(frozen=True)
class Resources:
    """What a reward may use besides trajectories and questions; a reward says in `needs` what must be there.

    Attributes:
        gold_texts: text (without title) of each gold passage of the questions, by passage id.
        likelihood: under a frozen copy of the start policy.
        encode: text to token ids.
    """

    gold_texts: Mapping[str, str] = field(default_factory=dict)
    likelihood: Likelihood | None = None
    encode: Callable[[str], list[int]] | None = None


NOTHING = Resources()


class Reward(Protocol):
    """Scores a batch (so that a judge can be called once); unfinished trajectories are allowed."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """What questions and resources must hold."""
        ...

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], resources: Resources = NOTHING
    ) -> list[Scores]: ...


class EachReward(ABC):
    """A `Reward` that looks at one trajectory at a time."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing, unless a reward says otherwise."""
        return ()

    @abstractmethod
    def score(self, trajectory: Trajectory, question: Question, resources: Resources) -> Scores:
        """Rewards of this trajectory."""

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], resources: Resources = NOTHING
    ) -> list[Scores]:
        """One `Scores` per trajectory."""
        return [self.score(t, question, resources) for t, question in zip(trajectories, questions, strict=True)]


def on_last_token(trajectory: Trajectory, value: float, **parts: float) -> Scores:
    """An outcome reward: on the last token the policy wrote; nothing is placed where it wrote none."""
    last = trajectory.last_generated
    return Scores(value, ((last, value),) if last >= 0 else (), parts)


def on_turns(trajectory: Trajectory, values: Mapping[int, float], **parts: float) -> Scores:
    """Turn rewards: on the token that completes each turn's action (turn number -> value); they are no outcome.

    Nothing is placed for a turn in which the policy wrote nothing (it ended the call at once).
    """
    turns = [(trajectory.turns[number], value) for number, value in sorted(values.items())]
    return Scores(0.0, tuple((turn.end - 1, value) for turn, value in turns if turn.end > turn.start), parts)


def total(scores: Sequence[Scores]) -> Scores:
    """The sum of several rewards of one trajectory; values at one token add up (methods README, decision 6)."""
    placed: dict[int, float] = {}
    parts: dict[str, float] = {}
    for score in scores:
        for position, value in score.placed:
            placed[position] = placed.get(position, 0.0) + value
        parts.update(score.parts)
    return Scores(sum(s.outcome for s in scores), tuple(sorted(placed.items())), parts)
