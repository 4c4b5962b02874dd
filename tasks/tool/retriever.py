"""The agent in place of an index: evidence comes first, and then the passages that it read.

So every client of a retriever can use it. A client that asks for one passage gets the evidence alone. After what the
agent read, passages of a plain search for the question follow, so that each query has as many hits as an index gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks import store
from tasks.retrieval import check_request, search_again
from tasks.tool.agent import EvidenceAgent, Found
from tasks.types import Hit

TITLE = "Evidence"


@dataclass(frozen=True)
class EvidenceRetriever:
    """See `tasks.retrieval.Retriever`.

    Attributes:
        agent: searches for the queries, which are questions.
        num_passages: of its index.
    """

    agent: EvidenceAgent
    num_passages: int

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Evidence and passages for each question, best first; scores are 1, 1/2, 1/3 and so on.

        Raises:
            ValueError: as for any retriever.
            RetrievalError: a search of the agent failed, or it cannot take a question.
        """
        check_request(queries, top_k)
        if not queries:
            return []
        count = min(top_k, self.num_passages)
        found = self.agent.find(queries)
        plain = search_again(self.agent.retriever, queries, count)
        return [ranked(*one, count) for one in zip(queries, found, plain, strict=True)]


def ranked(question: str, found: Found, plain: Sequence[Hit], count: int) -> list[Hit]:
    """`count` hits: the evidence, the passages that were read, those of a plain search."""
    evidence = [Hit(f"evidence:{store.digest(question, found.evidence)}", 1.0, TITLE, found.evidence)]
    hits = [*(evidence if found.evidence else []), *found.passages, *plain]
    different: dict[str, Hit] = {}
    for hit in hits:
        different.setdefault(hit.passage_id, hit)
    best = list(different.values())[:count]
    return [Hit(hit.passage_id, 1 / rank, hit.title, hit.text) for rank, hit in enumerate(best, 1)]
