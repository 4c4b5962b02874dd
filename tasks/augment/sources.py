"""Search sources, which decide for each query whether its result is valid. A failed search is an error, not invalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.retrieval import Retriever, search_again
from tasks.text import normalize
from tasks.types import Hit, Hop


@dataclass(frozen=True)
class Probe:
    """One query and its resolved hop."""

    query: str
    hop: Hop


@dataclass(frozen=True)
class Source:
    """A named retriever. `is_lexical`: a score of 0 means that no word of the query was found."""

    name: str
    retriever: Retriever
    is_lexical: bool

    def valid(self, probes: Sequence[Probe], top_k: int, validity: Literal["nonempty", "answer"]) -> list[bool]:
        """For each probe, whether the result is valid; see `AugmentConf.validity`.

        Raises:
            RetrievalError: a search failed.
        """
        found = search_again(self.retriever, [probe.query for probe in probes], top_k)
        if validity == "nonempty":
            return [any(hit.score > 0 or not self.is_lexical for hit in hits) for hits in found]
        return [_answers(hits, probe.hop) for hits, probe in zip(found, probes, strict=True)]


def is_lexical(settings: Any) -> bool:
    """Whether a retriever with these settings ranks by the words of the query alone."""
    is_terms = settings.backend == "elasticsearch" and settings.mode == "bm25"
    return bool(settings.backend == "bm25" or is_terms)


def majority(num_sources: int) -> int:
    """ceil(M/2): sources in which a query must be valid.

    >>> [majority(m) for m in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    return (num_sources + 1) // 2


def _answers(hits: Sequence[Hit], hop: Hop) -> bool:
    answer = f" {normalize(hop.answer)} "
    return any(
        hit.passage_id == hop.support_passage_id or answer in f" {normalize(f'{hit.title} {hit.text}')} "
        for hit in hits
    )
