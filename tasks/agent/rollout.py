"""The rollout loop: many questions at once, turn by turn, until every trajectory is complete.

`Player.play` plays questions to their end. A caller that wants to look at, fork or drop rows on the way calls its
pieces itself: `start`, then `act` and `observe` in alternation, then `finish`.

Token ids are the truth: exactly the sampled ids are trained, and observations are appended as ids and never pass
through text again. All searches of a turn are one batched call. A search that fails after its retries makes a `failed`
trajectory; it is never an empty observation. This module knows no reward.

Search-R1 Section 3.2 (arXiv 2503.09516; docs/methods/search_r1.md)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.agent.free_play import FreePlay
from tasks.agent.grammar import SearchGrammar
from tasks.agent.observation import observation_ids
from tasks.agent.prompts import Prompt, prompt_ids
from tasks.agent.row import Row
from tasks.agent.searches import search_for_rows
from tasks.clock import Clock
from tasks.conf import require
from tasks.generate import FreeGenerator, Generator, Sampling, Session
from tasks.retrieval import RetrievalError, Retriever
from tasks.types import Action, Hit, Question, Trajectory, Turn


@dataclass(frozen=True)
class RolloutConf:
    """Budgets of a trajectory, in tokens unless said otherwise.

    Attributes:
        max_turns: model calls whose search is executed; after these the policy has one more call to answer.
        max_prompt_tokens: a longer prompt is an error.
        max_call_tokens: per model call.
        max_observation_tokens: documents of one query, cut before the closing tag is added; a call with several
            queries has this budget once per query.
        max_total_tokens: prompt + response; a trajectory that would exceed it ends as `overflow`.
        top_k: passages per search.
        batch_rows: trajectories played at once.
        search_retries: how often a failed search is repeated, after 1, 2, 4, ... seconds.
        share_reading: what prompts begin with in common, and an observation that several trajectories of equal text
            get, is read once (`Sampling`).
        overlap_searches: a trajectory goes on when its own search has returned, another question begins when one has
            ended, and so many searches run at once. Trajectories are the same bits for any number and any
            `batch_rows`. It needs a generator whose rows are free (`rows`). 0 waits for the searches of all.
    """

    max_turns: int
    max_prompt_tokens: int
    max_call_tokens: int
    max_observation_tokens: int
    max_total_tokens: int
    top_k: int
    batch_rows: int
    search_retries: int = 2
    share_reading: bool = False
    overlap_searches: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.batch_rows <= 10**6, "batch_rows", self.batch_rows, "1 to 1000000")
        for name in ("max_prompt_tokens", "max_call_tokens", "max_observation_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(1 <= self.top_k <= 1000, "top_k", self.top_k, "1 to 1000")
        require(self.max_turns >= 0, "max_turns", self.max_turns, "0 (no search) or more")
        require(0 <= self.search_retries <= 20, "search_retries", self.search_retries, "0 to 20, whose waits double")
        require(0 <= self.overlap_searches <= 1024, "overlap_searches", self.overlap_searches, "0 (none) to 1024")
        expected = f"more than max_prompt_tokens={self.max_prompt_tokens}"
        require(self.max_total_tokens > self.max_prompt_tokens, "max_total_tokens", self.max_total_tokens, expected)


@dataclass
class RolloutCost:
    """Counts of play: tokens read without sampling, tokens sampled, searches executed."""

    prefilled: int = 0
    generated: int = 0
    searches: int = 0


@dataclass
class Player:
    """Plays questions with one policy, retriever, grammar and prompt; see `play`."""

    conf: RolloutConf
    generator: Generator
    tokenizer: Any
    retriever: Retriever
    grammar: SearchGrammar
    prompt: Prompt
    cost: RolloutCost = field(default_factory=RolloutCost)
    clock: Clock = field(default_factory=Clock)
    sleep: Callable[[float], None] = time.sleep

    def prompts(self, questions: Sequence[Question]) -> list[list[int]]:
        """Token ids of each question's prompt.

        Raises:
            DataError: a prompt over its budget.
        """
        limit = self.conf.max_prompt_tokens
        return [prompt_ids(self.tokenizer, self.prompt, q, self.grammar, limit) for q in questions]

    def play(
        self,
        questions: Sequence[Question],
        copies: int,
        sampling: Sampling,
        progress: Callable[[int], object] = lambda done: None,
    ) -> list[Trajectory]:
        """Play each question `copies` times; the trajectories of question i begin at index i * copies.

        Group ids are unique within the call. `sampling.stop` is replaced by the grammar's.

        Raises:
            DataError: a prompt over its budget; raised before anything is played.
        """
        prompts = self.prompts(questions)
        batches = self.batches(len(questions), copies)
        if self.conf.overlap_searches and batches:
            first = self._start(questions, prompts, batches[0], copies, sampling)
            return self.finish(FreePlay(self, questions, prompts, copies, first, progress).run())

        trajectories: list[Trajectory] = []
        for batch in batches:
            rows = self._start(questions, prompts, batch, copies, sampling)
            while playing := [row for row in rows if not row.is_over]:
                actions = self.act(playing)
                self.observe(playing, actions)
                progress(len(trajectories) + sum(row.is_over for row in rows))
            trajectories.extend(self.finish(rows))
        return trajectories

    def batches(self, num_questions: int, copies: int) -> list[range]:
        """Ranges of questions to start together, each at most `batch_rows` rows or one question."""
        at_once = max(1, self.conf.batch_rows // copies)
        return [range(first, min(first + at_once, num_questions)) for first in range(0, num_questions, at_once)]

    def start(
        self, questions: Sequence[Question], copies: int, sampling: Sampling, batch: range | None = None
    ) -> list[Row]:
        """Rows of one new session; those of the i-th started question begin at index i * copies.

        Args:
            questions: of one draw; group ids are unique within it.
            copies: rows of each question; its prompt is read once.
            sampling: `stop` is replaced by the grammar's.
            batch: which of the questions to start, one of `batches`; None starts all. Its first index seeds the draws.

        Raises:
            DataError: a prompt over its budget.
        """
        batch = batch or range(len(questions))
        prompts = dict(zip(batch, self.prompts([questions[i] for i in batch]), strict=True))
        return self._start(questions, prompts, batch, copies, sampling)

    def _start(
        self,
        questions: Sequence[Question],
        prompts: Sequence[list[int]] | dict[int, list[int]],
        batch: range,
        copies: int,
        sampling: Sampling,
    ) -> list[Row]:
        are_free = isinstance(self.generator, FreeGenerator)
        seeded = replace(
            sampling,
            stop=self.grammar.stop,
            seed=sampling.seed * 1_000_003 + (0 if are_free else batch.start),
            first_row=batch.start * copies if are_free else 0,
            share_reading=self.conf.share_reading,
        )
        session = self.generator.open([prompts[i] for i in batch], copies, seeded, self.conf.max_total_tokens)
        self.cost.prefilled += session.num_prefilled
        owners = [i for i in batch for _ in range(copies)]
        return [Row.begun(questions[i], i, session, number, prompts[i]) for number, i in enumerate(owners)]

    def act(self, rows: Sequence[Row]) -> list[Action]:
        """One call of the policy for each row, recorded as its next turn; rows that answered or are out of turns end.

        Raises:
            ValueError: a row that is over or waits for an observation, or rows of several sessions.
        """
        if not rows:
            return []
        session = _session_of(rows, has_acted=False)
        with self.counted(session):
            written = self._call(session, rows)

        actions = [self.acted(row, ids) for row, ids in zip(rows, written, strict=True)]
        session.close([row.number for row in rows if row.is_over])
        return actions

    def acted(self, row: Row, ids: Sequence[int]) -> Action:
        """Record what a row has written as its next turn; it is over if it answered or is out of turns."""
        text = self.decode(ids)
        action = self.grammar.parse(text)
        end = len(row.response)
        row.has_acted = True
        row.turns.append(Turn(action, end - len(ids), end, end, text=text))
        if action.kind == "answer":
            row.status, row.answer = "answered", action.content
        elif len(row.turns) > self.conf.max_turns:
            row.status = "open"
        return action

    def _call(self, session: Session, rows: Sequence[Row]) -> list[list[int]]:
        """The ids that each row writes in one call.

        The generator stops at every closing tag, also at a stray one, which does not complete a call
        (`SearchGrammar.is_complete`). Rows that stopped at one go on writing.
        """
        ids: dict[int, list[int]] = {row.number: [] for row in rows}
        waiting = list(rows)
        while waiting:
            budgets = [self.budget(row, len(ids[row.number])) for row in waiting]
            waiting = [row for row, budget in zip(waiting, budgets, strict=True) if budget > 0]
            budgets = [budget for budget in budgets if budget > 0]
            calls = session.generate([row.number for row in waiting], budgets) if waiting else []

            for row, call in zip(waiting, calls, strict=True):
                ids[row.number].extend(call.token_ids)
                row.record(call)
            waiting = [
                row
                for row, call in zip(waiting, calls, strict=True)
                if call.stopped and not self.grammar.is_complete(self.decode(ids[row.number]))
            ]
        return [ids[row.number] for row in rows]

    def budget(self, row: Row, written: int) -> int:
        """Tokens that a row may still write in a call in which it has written so many."""
        return min(self.conf.max_call_tokens - written, self.conf.max_total_tokens - row.total)

    def observe(self, rows: Sequence[Row], actions: Sequence[Action]) -> None:
        """Search for all rows in one batch, then add an observation to each; rows that are over are skipped.

        Args:
            rows: of one session, after `act`.
            actions: of these rows, as `act` returned them.

        Raises:
            ValueError: a row that has not acted since its last observation, or rows of several sessions.
        """
        playing = [(row, action) for row, action in zip(rows, actions, strict=True) if not row.is_over]
        if not playing:
            return
        session = _session_of([row for row, _ in playing], has_acted=True)
        with self.clock("search"):
            results = self.search(playing)
        with self.counted(session):
            self.observed(playing, results)
        session.close([row.number for row, _ in playing if row.is_over])

    def search(self, asking: Sequence[tuple[Row, Action]]) -> dict[int, Any]:
        """The results of each row that searches, or the error of its search, by its number."""
        queries = {row.number: action.searches for row, action in asking if action.searches}
        return search_for_rows(self.retriever, queries, self.conf.top_k, self.conf.search_retries, self.sleep)

    def observed(self, asked: Sequence[tuple[Row, Action]], results: Mapping[int, Any]) -> None:
        """Add to each row the observation of its action."""
        for row, action in asked:
            row.has_acted = False
            self.cost.searches += len(action.searches)
            result = results.get(row.number)
            if isinstance(result, RetrievalError):
                row.status, row.error = "failed", str(result)
            else:
                self._append(row, action, result)

    def _append(self, row: Row, action: Action, hits: list[list[Hit]] | None) -> None:
        """Add the observation to the row's text and to its last turn; if it does not fit, the row is over."""
        is_last = len(row.turns) == self.conf.max_turns
        budget = self.conf.max_observation_tokens
        observation = observation_ids(self.tokenizer, self.grammar, action, hits, budget, is_last)
        if row.total + len(observation) + 1 > self.conf.max_total_tokens:
            row.status = "overflow"
            return  # The policy never reads this observation, so it is not recorded.

        row.turns[-1] = replace(
            row.turns[-1],
            observation_end=len(row.response) + len(observation),
            observation=self.decode(observation),
            executed=hits is not None,
            hits=tuple(hit for of_query in hits or () for hit in of_query),
        )
        row.response.extend(observation)
        row.mask.extend([False] * len(observation))
        row.logprobs.extend([0.0] * len(observation))
        if observation:
            row.session.append([row.number], [observation])

    def fork(self, row: Row, times: int) -> list[Row]:
        """`times` new rows that continue this one in its session and group; the row itself stays open.

        The generator does not read their common text again. A row that has acted and not observed is forked after its
        last call.

        Raises:
            ValueError: a row that is over, or `times` below 1.
        """
        _session_of([row])
        with self.counted(row.session):
            return [row.copy(number) for number in row.session.fork(row.number, times)]

    def finish(self, rows: Sequence[Row]) -> list[Trajectory]:
        """The records of these rows. Rows that are still played end as `open`, and their memory may be used again."""
        for row in rows:
            if not row.is_over:
                row.status = "open"
                row.session.close([row.number])
        return [row.trajectory() for row in rows]

    @contextmanager
    def counted(self, session: Session) -> Iterator[None]:
        """Add to `cost` the tokens that the session reads and samples inside the block."""
        prefilled, generated = session.num_prefilled, session.num_generated
        try:
            yield
        finally:
            self.cost.prefilled += session.num_prefilled - prefilled
            self.cost.generated += session.num_generated - generated

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _session_of(rows: Sequence[Row], has_acted: bool | None = None) -> Session:
    """The one session of these rows; an error unless all are being played and, if it matters, all have (not) acted."""
    for row in rows:
        if row.is_over:
            raise ValueError(
                f"question {row.question.id!r}, row {row.number}: it is over ({row.status}), expected a row that is "
                "being played. Act and fork before a row answers or is finished."
            )
        if has_acted not in (None, row.has_acted):
            missing = "it has not acted. Call act" if has_acted else "its last call has no observation. Call observe"
            raise ValueError(f"question {row.question.id!r}, row {row.number}: {missing} first.")
        if row.session is not rows[0].session:
            raise ValueError(
                f"questions {rows[0].question.id!r} and {row.question.id!r}: their rows belong to two sessions, "
                "expected rows of one `start`. Play each session's rows by themselves."
            )
    return rows[0].session
