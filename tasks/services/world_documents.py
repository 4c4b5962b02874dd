"""A simulator for the search engine of training (ZeroSearch) that makes documents from the generated world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tasks.data.records import read_passages
from tasks.retrieval.generated import GeneratedRetriever
from tasks.retrieval.writers import WorldWriter
from tasks.services import Resources, Role

CORPUS = Path("artifacts/data/corpus.jsonl")


@dataclass(frozen=True)
class WorldDocuments:
    """The documents come from the corpus of the run; there is nothing to set."""

    role: ClassVar[Role] = "documents"
    needs_reference: ClassVar[bool] = False

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[GeneratedRetriever]:
        """Read the corpus into memory."""
        passages = read_passages(resources.root / CORPUS)
        yield GeneratedRetriever(WorldWriter([(passage.title, passage.text) for passage in passages]))


PART = WorldDocuments
