"""The search engine of training: the index, or a simulator. Evaluation always searches the index."""

from __future__ import annotations

from typing import Protocol

from tasks.retrieval import Retriever
from tasks.services import Role, Services


class Search(Protocol):
    """Chooses the retriever of training and tells it how far the run has come."""

    @property
    def services(self) -> tuple[Role, ...]:
        """The services it calls."""
        ...

    @property
    def depends_on_budget(self) -> bool:
        """Whether answers depend on the length of the run; a checkpoint then cannot be continued by a longer run."""
        ...

    def retriever(self, index: Retriever, services: Services) -> Retriever:
        """The retriever that answers the searches of training."""
        ...

    def announce(self, services: Services, done: float, seed: str) -> None:
        """Called before each draw of questions with the share of training that is over and the draw's seed."""
        ...
