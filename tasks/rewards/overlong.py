"""DAPO's soft penalty for responses close to the length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class OverlongPenalty(EachReward):
    """0 up to `limit - buffer` generated tokens, falling to -1 at `limit`, -1 beyond; on the last generated token.

    DAPO Eq. 13 (arXiv 2503.14476; docs/methods/dspo.md)

    Attributes:
        limit, buffer: in generated tokens.

    >>> [OverlongPenalty(10, 4).value(n) for n in (6, 7, 10, 99)]
    [0.0, -0.25, -1.0, -1.0]
    """

    components: ClassVar[tuple[str, ...]] = ("overlong",)

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        require(self.limit >= 1, "limit", self.limit, "at least 1 token")
        require(1 <= self.buffer <= self.limit, "buffer", self.buffer, f"from 1 to limit={self.limit} tokens")

    def value(self, num_tokens: int) -> float:
        """The penalty of a response of so many generated tokens."""
        return max(min(self.limit - self.buffer - num_tokens, 0) / self.buffer, -1.0)

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        value = self.value(trajectory.num_generated)
        return on_last_token(trajectory, value, overlong=value)


PART = OverlongPenalty
