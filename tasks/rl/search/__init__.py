"""Who answers the searches of training: the index, or a simulator. Evaluation always asks the index."""

from __future__ import annotations

from typing import Protocol

from tasks.retrieval import Retriever
from tasks.services import Role, Services


class Search(Protocol):
    """Chooses the retriever of training and tells it how far training is."""

    @property
    def services(self) -> tuple[Role, ...]:
        """The services it calls."""
        ...

    @property
    def depends_on_budget(self) -> bool:
        """Whether searches depend on how long the run is to be: then a longer run is another run."""
        ...

    def retriever(self, index: Retriever, services: Services) -> Retriever:
        """Who answers the searches of training."""
        ...

    def announce(self, services: Services, done: float, seed: str) -> None:
        """Called before each draw of questions; `done` is the share of training that is over, `seed` the draw's own."""
        ...
