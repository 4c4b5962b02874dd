"""Micro-batches: queries of concurrent requests are searched together, by one thread that calls `search`.

While a search runs, new queries collect and form the next batch, so batches grow with the load. When no search is
running and the last batch had several queries, the thread waits `max_wait_s` for more; with a single client it does not
wait. A query of several requests is searched once. All queries of a batch have the same `top_k`, so that every answer
equals that of a search of its own, also with approximate indexes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.retrieval import QueryError
from tasks.types import Hit

Key = tuple[str, int]
Answers = list[bytes]
_FAILURES_IN_A_ROW = 2
OF_A_QUERY = (QueryError, ValueError)
"""Errors of `search` that a query is to blame for."""


@dataclass(eq=False)
class _Asked:
    """A query without an answer yet, and the number of requests that wait for it."""

    key: Key
    answer: asyncio.Future[bytes]
    waiters: int = 0


class QueueFullError(RuntimeError):
    """Too many queries are waiting."""


class Batcher:
    """Answers the queries of many requests with few calls of `search`.

    Attributes:
        queued: queries that wait for a search.
    """

    def __init__(
        self,
        search: Callable[[list[str], int], list[list[Hit]]],
        encode: Callable[[Sequence[Hit]], bytes],
        max_batch: int,
        max_wait_s: float,
        max_queue: int,
        on_batch: Callable[[int, int, list[str], Answers], None],
    ) -> None:
        """Make a batcher; `start` begins its work.

        Args:
            search: `(queries, top_k) -> hits`, called by one thread only.
            encode: one query's hits as the bytes that `ask` returns.
            max_batch: queries of one search.
            max_wait_s: how long to wait for further queries when no search is running and the last one had several.
            max_queue: queries that may wait.
            on_batch: called in that thread after the answers were handed to the event loop, with the number of queries
                in the batch, `top_k`, the answered queries, and their answers.
        """
        self._search, self._encode, self._on_batch = search, encode, on_batch
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_s, max_queue
        # Queries that wait or are being searched; only the event loop's thread uses this.
        self._asked: dict[Key, _Asked] = {}
        self._waiting: dict[Key, _Asked] = {}  # In order of arrival; guarded by `_changed`.
        self._changed = threading.Condition()
        self._stopped = False
        self._last_size = 0
        # A daemon: a search that hangs must not keep a stopped server alive.
        self._thread = threading.Thread(target=self._work, name="search", daemon=True)

    @property
    def queued(self) -> int:
        """See the class."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to search; call from the event loop that asks."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current batch; waiting queries are answered with an error."""
        with self._changed:
            self._stopped = True
            left = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify()
        for asked in left:
            self._settle(asked, RuntimeError("the server is stopping"))
        self._thread.join(timeout_s)

    async def ask(self, queries: Sequence[str], top_k: int, timeout_s: float) -> Answers:
        """The encoded hits of each query.

        Raises:
            QueueFullError: too many queries wait.
            TimeoutError: no answer within `timeout_s`.
            Exception: whatever `search` raised.
        """
        if not queries:
            return []
        self._admit(queries, top_k)
        wanted = [self._join((query, top_k)) for query in queries]
        try:
            _, late = await asyncio.wait({asked.answer for asked in wanted}, timeout=timeout_s)
            if late:
                raise TimeoutError(f"{len(late)} of {len(wanted)} queries had no answer within {timeout_s:g} s")
            return [asked.answer.result() for asked in wanted]
        finally:
            for asked in wanted:
                self._leave(asked)

    def _admit(self, queries: Sequence[str], top_k: int) -> None:
        new = sum((query, top_k) not in self._asked for query in set(queries))
        if new + len(self._waiting) > self._max_queue:
            raise QueueFullError(f"{len(self._waiting)} queries wait, at most {self._max_queue} may")

    def _join(self, key: Key) -> _Asked:
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(key, self._loop.create_future())
            with self._changed:
                if self._stopped:
                    self._settle(asked, RuntimeError("the server is stopping"))
                else:
                    self._waiting[key] = asked
                    # At other sizes the thread has nothing new to do.
                    if len(self._waiting) == 1 or len(self._waiting) >= self._max_batch:
                        self._changed.notify()
        asked.waiters += 1
        return asked

    def _leave(self, asked: _Asked) -> None:
        """One request stops waiting; a query that no request waits for is not searched."""
        asked.waiters -= 1
        if asked.waiters == 0 and not asked.answer.done():
            with self._changed:
                unsearched = self._waiting.pop(asked.key, None)
            if unsearched is not None:
                del self._asked[asked.key]

    def _settle(self, asked: _Asked, result: bytes | Exception) -> None:
        self._asked.pop(asked.key, None)
        if isinstance(result, bytes):
            asked.answer.set_result(result)
        else:
            asked.answer.set_exception(result)
            asked.answer.exception()  # Marks the error as read: if all requests have left, asyncio would warn of it.

    def _work(self) -> None:
        while batch := self._next_batch():
            queries, top_k = [asked.key[0] for asked in batch], batch[0].key[1]
            results = self._answers(queries, top_k)
            try:
                self._loop.call_soon_threadsafe(self._deliver, batch, results)
            except RuntimeError:  # The event loop has ended.
                return
            found = {query: one for query, one in zip(queries, results, strict=True) if isinstance(one, bytes)}
            try:
                self._on_batch(len(batch), top_k, list(found), list(found.values()))
            except Exception as error:
                print(f"warning: after a search: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _deliver(self, batch: list[_Asked], results: list[bytes | Exception]) -> None:
        for asked, result in zip(batch, results, strict=True):
            self._settle(asked, result)

    def _next_batch(self) -> list[_Asked]:
        """The oldest waiting queries with the same `top_k`; empty if the batcher was stopped."""
        with self._changed:
            if not self._waiting:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                until = time.monotonic() + (self._max_wait_s if self._last_size > 1 else 0.0)
                while len(self._waiting) < self._max_batch and not self._stopped:
                    if (left := until - time.monotonic()) <= 0 or not self._changed.wait(left):
                        break
            # In the meantime all requests may have left.
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            batch: list[_Asked] = []
            for asked in self._waiting.values():
                if not batch or asked.key[1] == batch[0].key[1]:
                    batch.append(asked)
                    if len(batch) == self._max_batch:
                        break
            for asked in batch:
                del self._waiting[asked.key]
            self._last_size = len(batch)
            return batch

    def _answers(self, queries: list[str], top_k: int) -> list[bytes | Exception]:
        """One answer or error per query. The queries of a failed batch are searched again one by one."""
        try:
            return [self._encode(hits) for hits in self._found(queries, top_k)]
        except Exception as error:
            if len(queries) == 1:
                return [error]
        results: list[bytes | Exception] = []
        failures = 0
        for index, query in enumerate(queries):
            (one,) = self._answers([query], top_k)
            results.append(one)
            # What a query is to blame for says nothing about the other ones, which other clients may have sent.
            is_outage = isinstance(one, Exception) and not isinstance(one, OF_A_QUERY)
            failures = failures + 1 if is_outage else 0
            if is_outage and failures == _FAILURES_IN_A_ROW:
                return results + [one] * (len(queries) - index - 1)
        return results

    def _found(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        found = self._search(queries, top_k)
        assert len(found) == len(queries), f"{len(found)} results for {len(queries)} queries"
        return found
