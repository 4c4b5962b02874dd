"""A service that scores turns: by the parity of their first token, in place of a process reward model.

Put into `tasks/services/` it can be named in `conf/service/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tasks.conf import require
from tasks.services import Resources, Role
from tasks.types import Question, Trajectory


@dataclass
class ParityScorer:
    """See `tasks.services.TurnScores`. It lives while the service is open and writes down every call.

    Attributes:
        even, odd: scores.
        asked: trajectories of each call.
        is_open: whether the service runs.
    """

    even: float
    odd: float
    asked: list[int] = field(default_factory=list)
    is_open: bool = True

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        """A turn in which nothing was written is odd."""
        assert self.is_open
        assert [t.question_id for t in trajectories] == [question.id for question in questions]
        self.asked.append(len(trajectories))
        return [[self._of(t.response_ids[turn.start : turn.end]) for turn in t.turns] for t in trajectories]

    def _of(self, ids: Sequence[int]) -> float:
        return self.even if ids and ids[0] % 2 == 0 else self.odd


@dataclass(frozen=True)
class Parity:
    """The scores of turns whose first token has an even and an odd id."""

    role: ClassVar[Role] = "turn_scores"
    needs_reference: ClassVar[bool] = False

    even: float
    odd: float

    def __post_init__(self) -> None:
        for name in ("even", "odd"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ParityScorer]:
        """The scorer; when the run ends, what it was asked is printed."""
        scorer = ParityScorer(self.even, self.odd)
        yield scorer
        scorer.is_open = False
        print(f"parity: {sum(scorer.asked)} trajectories in {len(scorer.asked)} calls", flush=True)


PART = Parity
