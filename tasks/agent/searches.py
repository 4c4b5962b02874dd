"""One batched search for many rows, with retries: a query that cannot be answered costs its own row alone.

A search that stays without an answer is an error of its row. It is never an empty list of passages, which would teach
the policy that nothing was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasks.retrieval import RetrievalError, Retriever
from tasks.types import Hit

_OUTAGE = 3  # Rows asked alone that fail one after another: then it is not the queries.

Found = list[list[Hit]] | RetrievalError
"""Passages of each query of a row, or why there are none."""


def search_for_rows(
    retriever: Retriever,
    queries: Mapping[int, Sequence[str]],
    top_k: int,
    retries: int,
    sleep: Callable[[float], None],
) -> dict[int, Found]:
    """Ask all rows' queries in one call, retried with growing pauses; where that fails, ask row by row.

    Where `_OUTAGE` rows fail one after another, all the remaining rows fail without being asked.

    Args:
        retriever: answers the queries.
        queries: row -> its queries.
        top_k: passages a query.
        retries: further tries of the whole call, after 1, 2, 4, ... seconds.
        sleep: waits so many seconds.
    """
    everything = [query for row in queries.values() for query in row]
    if not everything:
        return {}
    failure = RetrievalError("no attempt was made")
    for attempt in range(retries + 1):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        try:
            hits = iter(retriever.search(everything, top_k))
            return {row: [next(hits) for _ in asked] for row, asked in queries.items()}
        except RetrievalError as error:
            failure = error

    results: dict[int, Found] = dict.fromkeys(queries, failure)
    # One row alone has just been tried: its queries were the whole call.
    return results | _row_by_row(retriever, queries, top_k) if len(queries) > 1 else results


def _row_by_row(retriever: Retriever, queries: Mapping[int, Sequence[str]], top_k: int) -> dict[int, Found]:
    """The rows that were asked alone, until it is clear that the search engine is away."""
    results: dict[int, Found] = {}
    failed_in_turn = 0
    for row, asked in queries.items():
        try:
            results[row] = retriever.search(list(asked), top_k)
            failed_in_turn = 0
        except RetrievalError as error:
            results[row] = error
            failed_in_turn += 1
        if failed_in_turn == _OUTAGE:
            break
    return results
