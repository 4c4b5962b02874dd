"""Play without a barrier between turns: each row goes on when its own search has returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from tasks.generate import Call
from tasks.types import Action

if TYPE_CHECKING:
    from tasks.agent.rollout import Player, Row

Asked = list[tuple["Row", Action]]


class FreePlay:
    """One play of rows to their end.

    Searches run in threads of their own, while the other rows write on.

    Args:
        player: of these rows.
        rows: of one session, which have not acted yet.
        progress: gets the number of rows that are over.
    """

    def __init__(self, player: Player, rows: Sequence[Row], progress: Callable[[int], object]) -> None:
        self.player, self.rows, self.progress = player, rows, progress
        self.session = rows[0].session
        self._by_number = {row.number: row for row in rows}
        self._written: dict[int, list[int]] = {}  # By row, in its current call.
        self._searching: dict[Future[dict[int, Any]], Asked] = {}

    def run(self) -> None:
        """Play until all rows are over."""
        ready = list(self.rows)
        with ThreadPoolExecutor(self.player.conf.overlap_searches) as pool, self.player.counted(self.session):
            while ready or self._written or self._searching:
                ended = [row for row in ready if not self._begin(row)]
                if self._written:
                    ended += [
                        self._by_number[number] for number, call in self.session.advance() if self._ends(number, call)
                    ]
                self._act(ended, pool)
                ready = self._observe()
                self.session.close([row.number for row in self.rows if row.is_over])
                self.progress(sum(row.is_over for row in self.rows))

    def _begin(self, row: Row) -> bool:
        """Let the row write on; False where it may write no more."""
        written = self._written.setdefault(row.number, [])
        budget = self.player.budget(row, len(written))
        if budget > 0:
            self.session.submit(row.number, budget)
        return budget > 0

    def _ends(self, number: int, call: Call) -> bool:
        """Record a call; False where the generator stopped at a tag that completes nothing, and the row writes on."""
        row, written = self._by_number[number], self._written[number]
        written.extend(call.token_ids)
        self.player.record(row, call)
        is_stray = call.stopped and not self.player.grammar.is_complete(self.player.decode(written))
        return not (is_stray and self._begin(row))

    def _act(self, ended: Sequence[Row], pool: ThreadPoolExecutor) -> None:
        """Parse what these rows wrote, and search for those that go on."""
        acted = [(row, self.player.acted(row, self._written.pop(row.number))) for row in ended]
        asked = [(row, action) for row, action in acted if not row.is_over]
        # One search for each idle thread, so that a slow query holds up few rows; with one thread, all in one.
        count = max(1, min(len(asked), self.player.conf.overlap_searches - len(self._searching)))
        for part in filter(None, (asked[number::count] for number in range(count))):
            self._searching[pool.submit(self.player.search, part)] = part

    def _observe(self) -> list[Row]:
        """Add the results of searches that have returned, waiting for one if nobody writes; rows that can go on."""
        if not self._searching:
            return []
        done, _ = wait(self._searching, 0 if self._written else None, FIRST_COMPLETED)
        ready = []
        for future in done:
            asked = self._searching.pop(future)
            self.player.observed(asked, future.result())
            ready += [row for row, _ in asked if not row.is_over]
        return ready
