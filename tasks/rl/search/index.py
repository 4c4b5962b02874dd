"""The index answers the searches of training, as it does those of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.retrieval import Retriever
from tasks.services import Role, Services


@dataclass(frozen=True)
class IndexSearch:
    """The index as it is; there is nothing to set.

    Search-R1 Section 3.1 (arXiv 2503.09516; docs/methods/search_r1.md)
    """

    services: ClassVar[tuple[Role, ...]] = ()
    depends_on_budget: ClassVar[bool] = False

    def retriever(self, index: Retriever, services: Services) -> Retriever:
        """See `Search`."""
        return index

    def announce(self, services: Services, done: float, seed: str) -> None:
        """Does nothing: an index gives the same answers at any time."""


PART = IndexSearch
