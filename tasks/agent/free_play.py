"""Play without a barrier: a row goes on when its own search has returned, and another question begins when one ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tasks.agent.grammar import SearchGrammar
from tasks.agent.row import Row
from tasks.clock import Clock
from tasks.conf import require
from tasks.generate import Call, FreeSession, Session
from tasks.types import Action, Question

Asked = list[tuple[Row, Action]]


class Budgets(Protocol):
    """What is read of a `RolloutConf`."""

    @property
    def batch_rows(self) -> int:
        """Rows that are open at once."""

    @property
    def overlap_searches(self) -> int:
        """Searches that run at once."""


class Player(Protocol):
    """What is asked of `tasks.agent.rollout.Player`, which itself begins a free play."""

    clock: Clock
    grammar: SearchGrammar

    @property
    def conf(self) -> Budgets:
        """Its budgets."""

    def counted(self, session: Session) -> AbstractContextManager[None]:
        """Add what the session reads and samples inside the block to the cost."""

    def budget(self, row: Row, written: int) -> int:
        """Tokens that a row may still write in a call."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""

    def acted(self, row: Row, ids: Sequence[int]) -> Action:
        """Record what a row has written."""

    def search(self, asking: Sequence[tuple[Row, Action]]) -> dict[int, Any]:
        """Results of each row that searches."""

    def observed(self, asked: Sequence[tuple[Row, Action]], results: Mapping[int, Any]) -> None:
        """Add observations."""


def require_free(budgets: Budgets, is_free: bool) -> None:
    """Raise the ValueError for a play without a barrier with a generator whose rows do not go on by themselves."""
    expected = "0 (none) with this generator; `generator: rows` has rows that go on by themselves"
    require(is_free or not budgets.overlap_searches, "overlap_searches", budgets.overlap_searches, expected)


class FreePlay:
    """One play of questions to their end.

    Searches run in threads of their own, while other rows write on. At most `batch_rows` rows are open, or those of
    one question.

    Args:
        player: of these questions.
        questions, prompts, copies: what is played, and how often.
        first: rows of the first questions, in a session that was just opened.
        progress: gets the number of rows that are over.

    Raises:
        ValueError: the generator's rows are not free.
    """

    def __init__(
        self,
        player: Player,
        questions: Sequence[Question],
        prompts: Sequence[list[int]],
        copies: int,
        first: Sequence[Row],
        progress: Callable[[int], object],
    ) -> None:
        self.player, self.questions, self.prompts, self.copies = player, questions, prompts, copies
        self.rows, self.progress = list(first), progress
        session = first[0].session
        require_free(player.conf, isinstance(session, FreeSession))
        self.session: Any = session
        self._num_over = 0
        self._written: dict[int, list[int]] = {}  # By row, in its current call.
        self._searching: dict[Future[dict[int, Any]], Asked] = {}

    def run(self) -> list[Row]:
        """Play until all rows are over; returns them, those of question i from index i * copies."""
        ready = list(self.rows)
        with ThreadPoolExecutor(self.player.conf.overlap_searches) as pool, self.player.counted(self.session):
            while ready or self._written or self._searching:
                ended = [row for row in ready if not self._begin(row)]
                if self._written:
                    ended += [self.rows[number] for number, call in self.session.advance() if self._ends(number, call)]
                self._act(ended, pool)
                ready = self._observe() + self._admit()
                self.progress(self._num_over)
        return self.rows

    def _admit(self) -> list[Row]:
        """Rows of the next questions, as far as there is room."""
        first, rows = len(self.rows) // self.copies, []
        room = max(1, self.player.conf.batch_rows // self.copies) - -(-(len(self.rows) - self._num_over) // self.copies)
        coming = range(first, min(first + max(0, room), len(self.questions)))
        if coming:
            numbers = self.session.extend([self.prompts[i] for i in coming], self.copies)
            owners = [i for i in coming for _ in range(self.copies)]
            rows = [
                Row.begun(self.questions[i], i, self.session, number, self.prompts[i])
                for number, i in zip(numbers, owners, strict=True)
            ]
            self.rows += rows
        return rows

    def _close(self, rows: Sequence[Row]) -> None:
        over = [row.number for row in rows if row.is_over]
        self._num_over += len(over)
        self.session.close(over)

    def _begin(self, row: Row) -> bool:
        """Let the row write on; False where it may write no more."""
        written = self._written.setdefault(row.number, [])
        budget = self.player.budget(row, len(written))
        if budget > 0:
            self.session.submit(row.number, budget)
        return budget > 0

    def _ends(self, number: int, call: Call) -> bool:
        """Record a call; False where the generator stopped at a tag that completes nothing, and the row writes on."""
        row, written = self.rows[number], self._written[number]
        written.extend(call.token_ids)
        row.record(call)
        is_stray = call.stopped and not self.player.grammar.is_complete(self.player.decode(written))
        return not (is_stray and self._begin(row))

    def _act(self, ended: Sequence[Row], pool: ThreadPoolExecutor) -> None:
        """Parse what these rows wrote, and search for those that go on."""
        acted = [(row, self.player.acted(row, self._written.pop(row.number))) for row in ended]
        self._close(ended)
        asked = [(row, action) for row, action in acted if not row.is_over]
        # One search for each idle thread, so that a slow query holds up few rows; with one thread, all in one.
        count = max(1, min(len(asked), self.player.conf.overlap_searches - len(self._searching)))
        for part in filter(None, (asked[number::count] for number in range(count))):
            self._searching[pool.submit(self.player.search, part)] = part

    def _observe(self) -> list[Row]:
        """Add the results of searches that have returned, waiting for one if nobody writes; rows that can go on."""
        if not self._searching:
            return []
        with self.player.clock("search"):
            done, _ = wait(self._searching, 0 if self._written else None, FIRST_COMPLETED)
        observed = []
        for future in done:
            asked = self._searching.pop(future)
            self.player.observed(asked, future.result())
            observed += [row for row, _ in asked]
        self._close(observed)
        return [row for row in observed if not row.is_over]
