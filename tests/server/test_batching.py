"""Merged queries: everybody gets his own answer, few searches are made, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.retrieval import QueryError, RetrievalError
from tasks.server.app import encode_hits
from tasks.server.batching import Batcher, QueueFullError
from tasks.types import Hit
from tests.server.running import NumberRetriever


def _batcher(retriever: NumberRetriever, max_batch: int = 8, max_queue: int = 10_000, wait_s: float = 0.002) -> Batcher:
    return Batcher(retriever.search, encode_hits, max_batch, wait_s, max_queue, lambda *_: None)


def _run(batcher: Batcher, body: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        batcher.start()
        try:
            return await body
        finally:
            batcher.stop(10)

    return asyncio.run(main())


REQUESTS = st.lists(
    st.tuples(st.lists(st.sampled_from("abcdefgh"), max_size=6), st.integers(1, 5), st.integers(0, 3)), max_size=40
)


@settings(max_examples=30)
@given(requests=REQUESTS, max_batch=st.integers(1, 9))
def test_everybody_gets_his_own_answers(requests, max_batch):
    retriever = NumberRetriever(count=4, seconds=0.0005)
    batcher = _batcher(retriever, max_batch)

    async def one(queries: list[str], top_k: int, pause: int) -> list[bytes]:
        await asyncio.sleep(pause / 1000)
        return await batcher.ask(queries, top_k, 10)

    async def body() -> list[list[bytes]]:
        return await asyncio.gather(*(one(*request) for request in requests))

    for (queries, top_k, _), answers in zip(requests, _run(batcher, body()), strict=True):
        assert answers == [encode_hits(retriever.hits(query, top_k)) for query in queries]
    assert all(1 <= len(queries) <= max_batch for queries, _ in retriever.batches)
    assert batcher.queued == 0


async def _blocked(batcher: Batcher, retriever: NumberRetriever) -> asyncio.Task[list[bytes]]:
    """A search that is running and will not end before `retriever.free` is set."""
    retriever.free.clear()
    first = asyncio.create_task(batcher.ask(["first"], 1, 10))
    await asyncio.sleep(0)  # Asked,
    while batcher.queued:  # and taken by the search.
        await asyncio.sleep(0.001)
    return first


def test_waiting_queries_are_merged_and_equal_ones_searched_once():
    retriever = NumberRetriever()
    batcher = _batcher(retriever, max_batch=16)

    async def body() -> None:
        first = await _blocked(batcher, retriever)
        others = [asyncio.create_task(batcher.ask([f"q{i % 10}", f"q{i % 10}"], 2, 10)) for i in range(50)]
        deeper = asyncio.create_task(batcher.ask(["q1"], 3, 10))
        await asyncio.sleep(0)
        assert batcher.queued == 11
        retriever.free.set()
        await asyncio.gather(first, deeper, *others)

    _run(batcher, body())
    assert [(len(queries), top_k) for queries, top_k in retriever.batches] == [(1, 1), (10, 2), (1, 3)]


def test_a_query_that_fails_does_not_fail_its_neighbours():
    retriever = NumberRetriever(bad=lambda query: query == "bad")
    batcher = _batcher(retriever)

    async def body() -> list[Any]:
        first = await _blocked(batcher, retriever)
        tasks = [asyncio.create_task(batcher.ask([query], 1, 10)) for query in ("a", "bad", "b", "c")]
        await asyncio.sleep(0)
        retriever.free.set()
        return (await asyncio.gather(first, *tasks, return_exceptions=True))[1:]

    answers = _run(batcher, body())
    assert [isinstance(answer, RetrievalError) for answer in answers] == [False, True, False, False]
    assert [len(queries) for queries, _ in retriever.batches] == [1, 4, 1, 1, 1, 1]  # Together, then each alone.


@settings(max_examples=20)
@given(bad=st.lists(st.booleans(), min_size=1, max_size=30), kind=st.sampled_from([QueryError, ValueError]))
def test_beside_bad_queries_the_others_get_what_they_would_get_alone(bad, kind):
    class Refusing(NumberRetriever):
        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            found = super().search(queries, top_k)
            if any("bad" in query for query in queries):
                raise kind("not that one")
            return found

    retriever = Refusing()
    batcher = _batcher(retriever, max_batch=16)
    queries = [f"{'bad' if is_bad else 'good'} {number}" for number, is_bad in enumerate(bad)]

    async def body() -> list[Any]:
        first = await _blocked(batcher, retriever)
        tasks = [asyncio.create_task(batcher.ask([query], 2, 10)) for query in queries]
        await asyncio.sleep(0)
        retriever.free.set()
        return (await asyncio.gather(first, *tasks, return_exceptions=True))[1:]

    for query, is_bad, answer in zip(queries, bad, _run(batcher, body()), strict=True):
        assert isinstance(answer, kind) if is_bad else answer == [encode_hits(retriever.hits(query, 2))]


def test_an_outage_fails_all_after_few_searches():
    retriever = NumberRetriever(bad=lambda query: True)
    batcher = _batcher(retriever, max_batch=64)

    async def body() -> list[Any]:
        first = await _blocked(batcher, retriever)
        tasks = [asyncio.create_task(batcher.ask([str(i)], 1, 10)) for i in range(40)]
        await asyncio.sleep(0)
        retriever.free.set()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    assert all(isinstance(answer, RetrievalError) for answer in _run(batcher, body()))
    assert [len(queries) for queries, _ in retriever.batches] == [1, 40, 1, 1]


def test_a_slow_search_times_out_and_abandoned_queries_are_not_searched():
    retriever = NumberRetriever()
    batcher = _batcher(retriever)

    async def body() -> None:
        first = await _blocked(batcher, retriever)
        with pytest.raises(TimeoutError, match=r"2 of 2 queries had no answer within 0.1 s"):
            await batcher.ask(["first", "never"], 1, 0.1)
        assert batcher.queued == 0
        retriever.free.set()
        assert await first
        assert await batcher.ask(["after"], 1, 10)

    _run(batcher, body())
    assert [queries for queries, _ in retriever.batches] == [["first"], ["after"]]


def test_the_queue_is_bounded():
    retriever = NumberRetriever()
    batcher = _batcher(retriever, max_queue=5)

    async def body() -> None:
        first = await _blocked(batcher, retriever)
        full = asyncio.create_task(batcher.ask(list("abcde"), 1, 10))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="5 queries wait, at most 5 may"):
            await batcher.ask(["f"], 1, 10)
        again = asyncio.create_task(batcher.ask(list("abc"), 1, 10))  # On their way already: no place needed.
        retriever.free.set()
        await asyncio.gather(first, again, full)

    _run(batcher, body())


def test_stopping_answers_what_still_waits():
    retriever = NumberRetriever()
    batcher = _batcher(retriever)

    async def body() -> None:
        batcher.start()
        first = await _blocked(batcher, retriever)
        waiting = asyncio.create_task(batcher.ask(["waiting"], 1, 10))
        await asyncio.sleep(0)
        batcher.stop(0.01)
        retriever.free.set()
        with pytest.raises(RuntimeError, match="stopping"):
            await waiting
        assert await first
        with pytest.raises(RuntimeError, match="stopping"):
            await batcher.ask(["late"], 1, 10)

    asyncio.run(body())


def test_cancelled_requests_leave_the_others_alone():
    rng = random.Random(0)
    retriever = NumberRetriever(seconds=0.001)
    batcher = _batcher(retriever)

    async def body() -> list[Any]:
        tasks = [asyncio.create_task(batcher.ask([f"q{rng.randrange(8)}"], 1, 10)) for _ in range(200)]
        await asyncio.sleep(0.002)
        for task in tasks[::3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = _run(batcher, body())
    assert all(isinstance(a, list | asyncio.CancelledError) for a in answers)
    assert all(isinstance(a, list) for i, a in enumerate(answers) if i % 3)
    assert batcher.queued == 0
