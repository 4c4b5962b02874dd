"""The generated world plays the search engine of training (ZeroSearch): it writes documents from its own corpus."""

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
    """It has no setting: the corpus of the run is the world."""

    role: ClassVar[Role] = "documents"
    needs_reference: ClassVar[bool] = False

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[GeneratedRetriever]:
        """Read the corpus into memory; nothing is closed."""
        passages = read_passages(resources.root / CORPUS)
        yield GeneratedRetriever(WorldWriter([(passage.title, passage.text) for passage in passages]))


PART = WorldDocuments
