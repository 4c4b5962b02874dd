"""One batched search for many rows, with retries: a query that cannot be answered fails only its own row.

A search without an answer is an error of its row. It is never an empty list of passages, which would teach the policy
that the search engine has no such passage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasks.retrieval import QueryError, RetrievalError, Retriever, search_again
from tasks.types import Hit

_OUTAGE = 3  # So many rows fail one after another: the search engine is down, and the queries are not to blame.

RowResult = list[list[Hit]] | RetrievalError
"""Passages of each query of a row, or the error of its search."""


def search_for_rows(
    retriever: Retriever,
    queries: Mapping[int, Sequence[str]],
    top_k: int,
    retries: int,
    sleep: Callable[[float], None],
) -> dict[int, RowResult]:
    """Send the queries of all rows in one call, retried with growing pauses; if that fails, search row by row.

    After `_OUTAGE` rows that fail one after another, all remaining rows fail without a search. A row whose query the
    engine refuses is none of them.

    Args:
        retriever: answers the queries.
        queries: row -> its queries.
        top_k: passages per query.
        retries: how often the whole call is repeated, after 1, 2, 4, ... seconds.
        sleep: waits for a number of seconds.
    """
    everything = [query for row in queries.values() for query in row]
    if not everything:
        return {}
    try:
        hits = iter(search_again(retriever, everything, top_k, retries, sleep))
        return {row: [next(hits) for _ in of_row] for row, of_row in queries.items()}
    except RetrievalError as error:
        failure = error

    results: dict[int, RowResult] = dict.fromkeys(queries, failure)
    # A single row's queries were the whole call, so a search of its own would repeat what has just failed.
    return results | _row_by_row(retriever, queries, top_k) if len(queries) > 1 else results


def _row_by_row(retriever: Retriever, queries: Mapping[int, Sequence[str]], top_k: int) -> dict[int, RowResult]:
    """Results of the rows that were searched one by one, up to an outage."""
    results: dict[int, RowResult] = {}
    failures_in_a_row = 0
    for row, of_row in queries.items():
        try:
            results[row] = retriever.search(list(of_row), top_k)
            failures_in_a_row = 0
        except QueryError as error:
            results[row] = error
            failures_in_a_row = 0
        except RetrievalError as error:
            results[row] = error
            failures_in_a_row += 1
        if failures_in_a_row == _OUTAGE:
            break
    return results
