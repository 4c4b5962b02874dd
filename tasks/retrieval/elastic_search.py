"""Searches of one Elasticsearch index, each answered whole: a shard or node that did not answer is no empty result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tasks.retrieval import QueryError, RetrievalError, elastic_server
from tasks.retrieval.elastic_server import Cluster, PassingError
from tasks.store import Row
from tasks.text import composed

MAX_QUERY_PIECES = 1_000  # A server takes at least 1,024 clauses in one query.

# Matches at least as many pieces as an analyzer makes of a text: words, single signs, and every character of scripts
# without spaces.
_PIECE = re.compile(r"[\u2190-\U0010ffff]|[^\W\u2190-\U0010ffff]{1,255}|[^\w\s]|_")
_SURROGATE = re.compile("[\ud800-\udfff]")

_FIELDS = "status error timed_out _shards.total _shards.failed hits.hits._score".split()


class Searches:
    """Searches of the index `index`, by its own name.

    Args:
        cluster: that has the index.
        index: its name.
        batch: searches of one request.
        advice: ends the message where the index is not what it was.
        parts: of each hit, besides its score.
    """

    def __init__(
        self, cluster: Cluster, index: str, batch: int, advice: str, parts: tuple[str, ...] = ("_source",)
    ) -> None:
        self._cluster, self._index, self._batch, self._advice = cluster, index, batch, advice
        wanted = [*_FIELDS, *(f"hits.hits.{part}" for part in parts)]
        self._wanted = ",".join(f"responses.{name}" for name in wanted)

    def ask(self, bodies: list[Row]) -> list[list[Row]]:
        """The hits of each body, as the server writes them and in its order.

        Raises:
            RetrievalError: the server refused a search, has lost the index, or kept failing.
        """
        return [answer for part in self._parts(bodies) for answer in self._search(part)]

    def lost(self, reason: str) -> RetrievalError:
        """The error of an index that is not what it was."""
        return RetrievalError(
            f"elasticsearch: index {self._index} at {self._cluster.hosts} is not what it was: {reason}. {self._advice}"
        )

    def _parts(self, bodies: list[Row]) -> Iterator[list[Row]]:
        for start in range(0, len(bodies), self._batch):
            yield bodies[start : start + self._batch]

    def _search(self, bodies: list[Row]) -> list[list[Row]]:
        """Hits of each body, complete: a shard or node that did not answer makes the request fail and try again."""
        searches = [line for body in bodies for line in ({"allow_partial_search_results": False}, body)]

        def request(client: Any) -> list[list[Row]]:
            # DFS: term statistics of the whole index, so that the number of shards changes no score.
            answer = client.msearch(
                index=self._index, searches=searches, search_type="dfs_query_then_fetch", filter_path=self._wanted
            )
            found = answer.get("responses", [])
            if len(found) != len(bodies):
                raise PassingError(f"{len(found)} answers to {len(bodies)} searches")
            return [self._hits(one) for one in found]

        return self._cluster.ask("the search", request)

    def _hits(self, answer: Row) -> list[Row]:
        status = int(answer.get("status", 500))
        if "error" in answer:
            reason = f"HTTP {status}: {elastic_server.describe(answer)}"
            if status == 404:
                raise self.lost(reason)
            if not elastic_server.passes(status):
                kind = QueryError if status in (400, 413) else RetrievalError
                raise kind(f"elasticsearch: the search was refused: {reason}.")
            raise PassingError(reason)

        shards = answer.get("_shards", {})
        if answer.get("timed_out") or shards.get("failed") or "total" not in shards:
            raise PassingError(f"an incomplete answer: timed_out={answer.get('timed_out')}, shards={shards}")
        hits: list[Row] = answer.get("hits", {}).get("hits", [])
        return hits


def clean(query: str, most: int = MAX_QUERY_PIECES) -> str:
    """A query the server can take: no half characters, composed, at most `most` words and signs.

    >>> clean("Zu\u0308rich \\ud800")
    'Zürich \\ufffd'
    """
    text = composed(_SURROGATE.sub("\ufffd", query))
    for number, piece in enumerate(_PIECE.finditer(text), start=1):
        if number == most:
            return text[: piece.end()]
    return text
