"""When a simulated search engine answers with noise: ZeroSearch's curriculum (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.conf import require


@dataclass(frozen=True)
class Simulator:
    """The curriculum.

    Attributes:
        writer: `world` for the generated world's own, `endpoint` for a language model.
        noise_start, noise_end: share of queries with noisy documents at the first and the last step.
        base: of the exponential curve between them; the larger, the later noise rises. 1 is a straight line.
    """

    writer: Literal["world", "endpoint"]
    noise_start: float
    noise_end: float
    base: float

    def __post_init__(self) -> None:
        for name in ("noise_start", "noise_end"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")
        require(self.base >= 1, "base", self.base, "at least 1")

    def noise(self, done: float) -> float:
        """Share of noisy answers when a share `done` of the training is over.

        >>> [round(Simulator("world", 0.0, 0.5, 4.0).noise(d), 4) for d in (0, 0.5, 1)]
        [0.0, 0.1667, 0.5]
        """
        rise = done if self.base == 1 else (self.base**done - 1) / (self.base - 1)
        return self.noise_start + rise * (self.noise_end - self.noise_start)
