"""The rollout loop: many questions at once, turn by turn, until every trajectory is complete.

Token ids are the truth: what the generator sampled is what is trained, observations are appended as ids
and never pass through text again. One batched retrieval call per turn. A search that fails after its
retries makes a `failed` trajectory; it is never an empty observation. This module knows no reward.

Source: search_r1 sections 1, 6 and 9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import prompt_ids
from tasks.conf import require
from tasks.generate import Call, Generator, Sampling, Session
from tasks.retrieval import RetrievalError, Retriever
from tasks.types import Action, Hit, Question, Status, Trajectory, Turn

_OUTAGE = 3  # Rows asked alone that fail one after another: then it is not the queries.


@dataclass(frozen=True)
class RolloutConf:
    """Budgets of a trajectory, in tokens unless said otherwise.

    Attributes:
        max_turns: model calls that may search; one more call follows, whose search is not executed.
        max_prompt_tokens: a longer prompt is an error.
        max_call_tokens: per model call.
        max_observation_tokens: documents of one query, cut before the closing tag is added; a call with several
            queries has as many such budgets together.
        max_total_tokens: prompt + response; a trajectory that would exceed it ends as `overflow`.
        top_k: passages per search.
        batch_rows: trajectories played at once.
        search_retries: further tries of a failed search, after 1, 2, 4, ... seconds.
    """

    max_turns: int
    max_prompt_tokens: int
    max_call_tokens: int
    max_observation_tokens: int
    max_total_tokens: int
    top_k: int
    batch_rows: int
    search_retries: int = 2

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_call_tokens", "max_observation_tokens", "top_k", "batch_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.max_turns >= 0, "max_turns", self.max_turns, "0 (no search) or more")
        require(self.search_retries >= 0, "search_retries", self.search_retries, "0 or more")
        require(
            self.max_total_tokens > self.max_prompt_tokens, "max_total_tokens", self.max_total_tokens,
            f"more than max_prompt_tokens={self.max_prompt_tokens}",
        )  # fmt: skip


@dataclass
class RolloutCost:
    """What playing cost: tokens read without sampling, tokens sampled, searches executed."""

    prefilled: int = 0
    generated: int = 0
    searches: int = 0


@dataclass
class _Row:
    """A trajectory under way."""

    question: Question
    group_id: str
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status | None = None
    answer: str | None = None
    error: str | None = None

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.response)

    def finish(self) -> Trajectory:
        return Trajectory(
            question_id=self.question.id,
            group_id=self.group_id,
            prompt_ids=tuple(self.prompt),
            response_ids=tuple(self.response),
            loss_mask=tuple(self.mask),
            sampler_logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            status=self.status or "open",
            answer=self.answer,
            error=self.error,
        )


@dataclass
class Player:
    """Plays questions with one policy, retriever, grammar and prompt; see `play`."""

    conf: RolloutConf
    generator: Generator
    tokenizer: Any
    retriever: Retriever
    grammar: SearchGrammar
    template: str
    cost: RolloutCost = field(default_factory=RolloutCost)
    sleep: Callable[[float], None] = time.sleep

    def prompts(self, questions: Sequence[Question]) -> list[list[int]]:
        """Token ids of each question's prompt.

        Raises:
            DataError: a prompt over its budget.
        """
        limit = self.conf.max_prompt_tokens
        return [prompt_ids(self.tokenizer, self.template, q, self.grammar, limit) for q in questions]

    def play(
        self, questions: Sequence[Question], group_size: int, sampling: Sampling,
        progress: Callable[[int], object] = lambda done: None,
    ) -> list[Trajectory]:  # fmt: skip
        """Play each question `group_size` times; trajectories of question i at i*group_size ... in order.

        Group ids are unique within the call. `sampling.stop` is replaced by the grammar's.

        Raises:
            DataError: a prompt over its budget; raised before anything is played.
        """
        conf = self.conf
        prompts = self.prompts(questions)
        at_once = max(1, conf.batch_rows // group_size)
        trajectories: list[Trajectory] = []
        for first in range(0, len(questions), at_once):
            some = range(first, min(first + at_once, len(questions)))
            rows = [_Row(questions[i], f"{questions[i].id}#{i}", prompts[i]) for i in some for _ in range(group_size)]
            seeded = replace(sampling, stop=self.grammar.stop, seed=sampling.seed * 1_000_003 + first)
            session = self.generator.open([prompts[i] for i in some], group_size, seeded, conf.max_total_tokens)
            self._play(session, rows)
            self.cost.prefilled += session.num_prefilled
            self.cost.generated += session.num_generated
            trajectories.extend(row.finish() for row in rows)
            progress(len(trajectories))
        return trajectories

    def _play(self, session: Session, rows: list[_Row]) -> None:
        for turn in range(self.conf.max_turns + 1):
            playing = [i for i, row in enumerate(rows) if row.status is None]
            if not playing:
                return
            is_last = turn == self.conf.max_turns
            actions = self._call(session, rows, playing)
            found = {} if is_last else self._search({i: actions[i].searches for i in playing if actions[i].searches})
            for i in playing:
                self._react(session, rows[i], i, actions[i], found.get(i), turn)
            session.close([i for i in playing if rows[i].status is not None])

    def _call(self, session: Session, rows: list[_Row], playing: list[int]) -> dict[int, Action]:
        """One call of every playing row; a stray closing tag does not end a call (grammar.is_complete)."""
        ids: dict[int, list[int]] = {i: [] for i in playing}
        waiting = playing
        while waiting:
            budgets = {i: self._budget(rows[i], len(ids[i])) for i in waiting}
            waiting = [i for i in waiting if budgets[i] > 0]
            calls = session.generate(waiting, [budgets[i] for i in waiting]) if waiting else []
            for i, call in zip(waiting, calls, strict=True):
                ids[i].extend(call.token_ids)
                self._record(rows[i], call)
            waiting = [
                i for i, call in zip(waiting, calls, strict=True)
                if call.stopped and not self.grammar.is_complete(self._decode(ids[i]))
            ]  # fmt: skip
        return {i: self.grammar.parse(self._decode(ids[i])) for i in playing}

    def _budget(self, row: _Row, written: int) -> int:
        return min(self.conf.max_call_tokens - written, self.conf.max_total_tokens - row.total)

    @staticmethod
    def _record(row: _Row, call: Call) -> None:
        row.response.extend(call.token_ids)
        row.mask.extend([True] * len(call.token_ids))
        row.logprobs.extend(call.logprobs)

    def _react(
        self,
        session: Session,
        row: _Row,
        i: int,
        action: Action,
        found: list[list[Hit]] | RetrievalError | None,
        turn_number: int,
    ) -> None:
        start = row.turns[-1].observation_end if row.turns else 0
        end = len(row.response)
        text = self._decode(row.response[start:end])
        turn = Turn(action, start, end, end, text=text)
        if action.kind == "answer":
            row.status, row.answer = "answered", action.content
        elif turn_number == self.conf.max_turns:
            row.status = "open"
        elif isinstance(found, RetrievalError):
            row.status, row.error = "failed", str(found)
        else:
            observation = self._observation(action, found)
            if turn_number == self.conf.max_turns - 1 and self.grammar.last_message:
                observation += self._encode(self.grammar.last_message)
            if row.total + len(observation) + 1 > self.conf.max_total_tokens:  # The policy never sees it.
                row.status, observation, found = "overflow", [], None
            turn = replace(
                turn, observation_end=end + len(observation), observation=self._decode(observation),
                executed=found is not None, hits=tuple(hit for hits in found or () for hit in hits),
            )  # fmt: skip
            row.response.extend(observation)
            row.mask.extend([False] * len(observation))
            row.logprobs.extend([0.0] * len(observation))
            if observation:
                session.append([i], [observation])
        row.turns.append(turn)

    def _search(self, asked: dict[int, tuple[str, ...]]) -> dict[int, list[list[Hit]] | RetrievalError]:
        """Each row's queries in one batched call, retried with growing pauses; then row by row.

        So a query that cannot be answered costs its own row alone. Where `_OUTAGE` rows in a row fail, all do.
        """
        queries = [query for row in asked.values() for query in row]
        if not queries:
            return {}
        self.cost.searches += len(queries)
        failure = RetrievalError("no attempt was made")
        for attempt in range(self.conf.search_retries + 1):
            if attempt:
                self.sleep(2.0 ** (attempt - 1))
            try:
                hits = iter(self.retriever.search(queries, self.conf.top_k))
                return {i: [next(hits) for _ in row] for i, row in asked.items()}
            except RetrievalError as error:
                failure = error
        found: dict[int, list[list[Hit]] | RetrievalError] = dict.fromkeys(asked, failure)
        failed = 0
        for i, row in asked.items() if len(asked) > 1 else ():
            try:
                found[i] = self.retriever.search(list(row), self.conf.top_k)
                failed = 0
            except RetrievalError as error:
                found[i], failed = error, failed + 1
            if failed == _OUTAGE:
                break
        return found

    def _observation(self, action: Action, found: list[list[Hit]] | None) -> list[int]:
        """Opening tag, documents cut to their budget, closing tag: the tag survives any cut (methods README, 4)."""
        if found is None:
            return self._encode(self.grammar.complaint(action))
        whole = self._encode(self.grammar.body(action, found))
        kept = whole[: self.conf.max_observation_tokens * len(found)]
        while len(kept) < len(whole) and kept and not self.grammar.may_end(self._decode(kept)):
            kept.pop()
        return self._encode(self.grammar.opening) + kept + self._encode(self.grammar.closing)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
