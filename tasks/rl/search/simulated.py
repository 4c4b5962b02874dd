"""A simulator answers the searches of training, with more and more noise: ZeroSearch's curriculum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.conf import require
from tasks.retrieval import Retriever
from tasks.services import Role, Services


@dataclass(frozen=True)
class SimulatedSearch:
    """The curriculum of noise; the service `documents` writes the documents.

    ZeroSearch Section 3 (arXiv 2505.04588; docs/methods/zerosearch.md)

    Attributes:
        noise_start, noise_end: share of queries with noisy documents at the first and the last step.
        base: of the exponential curve between them; with a larger base noise rises later, 1 is a straight line.
    """

    services: ClassVar[tuple[Role, ...]] = ("documents",)
    depends_on_budget: ClassVar[bool] = True

    noise_start: float
    noise_end: float
    base: float

    def __post_init__(self) -> None:
        for name in ("noise_start", "noise_end"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")
        require(self.base >= 1, "base", self.base, "at least 1")

    def noise(self, done: float) -> float:
        """Share of noisy answers when a share `done` of the training is over.

        >>> [round(SimulatedSearch(0.0, 0.5, 4.0).noise(d), 4) for d in (0, 0.5, 1)]
        [0.0, 0.1667, 0.5]
        """
        rise = done if self.base == 1 else (self.base**done - 1) / (self.base - 1)
        return self.noise_start + rise * (self.noise_end - self.noise_start)

    def retriever(self, index: Retriever, services: Services) -> Retriever:
        """The simulator."""
        return services["documents"]

    def announce(self, services: Services, done: float, seed: str) -> None:
        """Tell the simulator which share of this draw's answers is noisy."""
        services["documents"].announce(self.noise(done), seed)


PART = SimulatedSearch
