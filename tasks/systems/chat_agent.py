"""A chat model that plays as a policy does: turn by turn it writes, its searches are run, and it reads what they found.

Each turn is one message of the model, cut after the first end of a search or an answer, so that passages which it makes
up itself are dropped. A reply without either is an invalid call. All conversations of a chunk go on together, so that
the server gets many requests at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tasks.agent import grammars
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import PLACEHOLDER, Prompt, render_prompt
from tasks.agent.searches import search_for_rows
from tasks.retrieval import RetrievalError, Retriever
from tasks.services import Chat, Messages, Refusal, Reply, Role
from tasks.services.replies import check_prompt
from tasks.systems import Resources
from tasks.types import Cost, Episode, Hit, Mode, Question, Status, Turn


@dataclass
class _Talk:
    """One conversation."""

    question: Question
    messages: list[dict[str, str]]
    turns: list[Turn] = field(default_factory=list)
    status: Status | None = None
    answer: str | None = None
    error: str | None = None
    tokens: int = 0

    def episode(self) -> Episode:
        """The record of the play."""
        cost = Cost(0, self.tokens)
        return Episode(self.question.id, tuple(self.turns), self.status or "open", self.answer, self.error, cost)


@dataclass(frozen=True)
class ChatAgent:
    """See the module."""

    chat: Chat
    retriever: Retriever
    grammar: SearchGrammar
    prompt: Prompt
    max_turns: int
    top_k: int
    search_retries: int
    batch_questions: int
    sleep: Callable[[float], None] = time.sleep
    tokenizer: None = None

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> list[Episode]:
        """See `tasks.systems.System`; each turn of sampled play has a seed of its own."""
        talks = [_Talk(question, self._begun(question)) for question in questions]
        for number in range(self.max_turns + 1):
            playing = [talk for talk in talks if talk.status is None]
            if not playing:
                break
            request = {"temperature": 0} if mode == "greedy" else {"temperature": 1, "seed": seed * 64 + number}
            self._act(playing, request)
            self._observe([talk for talk in playing if talk.status is None], number + 1 == self.max_turns)
        return [talk.episode() for talk in talks]

    def _begun(self, question: Question) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.prompt.system}] if self.prompt.system else []
        text = render_prompt(self.prompt.user, question.question, self.grammar)
        return [*system, {"role": "user", "content": text}]

    def _act(self, talks: Sequence[_Talk], request: dict[str, Any]) -> None:
        """One message of the model in each conversation; an answer and a refusal end it, and so does the last turn."""
        conversations: list[Messages] = [talk.messages for talk in talks]
        with closing(self.chat.replies(conversations, request)) as replies:
            for talk, reply in zip(talks, replies, strict=True):
                self._read(talk, reply)

    def _read(self, talk: _Talk, reply: Reply | Refusal) -> None:
        if isinstance(reply, Refusal):
            talk.status, talk.error = "open", reply.detail
            return
        text = self._cut(reply.content)
        action = self.grammar.parse(text)
        talk.tokens += reply.tokens
        talk.turns.append(Turn(action, text=text))
        talk.messages.append({"role": "assistant", "content": text})
        if action.kind == "answer":
            talk.status, talk.answer = "answered", action.content
        elif len(talk.turns) > self.max_turns:
            talk.status = "open"

    def _cut(self, text: str) -> str:
        """The text up to the end of its first action; a generator that knows the tags would stop there."""
        ends = sorted(text.find(stop) + len(stop) for stop in self.grammar.stop if stop in text)
        complete = (text[:end] for end in ends if self.grammar.is_complete(text[:end]))
        return next(complete, text)

    def _observe(self, talks: Sequence[_Talk], is_last: bool) -> None:
        """Search for all conversations in one batch, and add what was found to each."""
        queries = {row: talk.turns[-1].action.searches for row, talk in enumerate(talks)}
        asked = {row: searches for row, searches in queries.items() if searches}
        found = search_for_rows(self.retriever, asked, self.top_k, self.search_retries, self.sleep)
        for row, talk in enumerate(talks):
            result = found.get(row)
            if isinstance(result, RetrievalError):
                talk.status, talk.error = "failed", str(result)
            else:
                self._append(talk, result, is_last)

    def _append(self, talk: _Talk, hits: Sequence[Sequence[Hit]] | None, is_last: bool) -> None:
        turn, grammar = talk.turns[-1], self.grammar
        if hits is None:
            observation = grammar.complaint(turn.action)
        else:
            observation = grammar.opening + grammar.body(turn.action, hits) + grammar.closing
        observation += grammar.last_message if is_last else ""
        flat = tuple(hit for of_query in hits or () for hit in of_query)
        talk.turns[-1] = Turn(
            turn.action, text=turn.text, observation=observation, executed=hits is not None, hits=flat
        )
        talk.messages.append({"role": "user", "content": observation})


@dataclass(frozen=True)
class ChatAgentSettings:
    """How a chat model plays.

    Attributes:
        prompt: instructions; `{question}` is replaced.
        grammar: kind and settings of the grammar that reads its text.
        max_turns, top_k: as of a policy.
        search_retries: how often a failed search is repeated.
        batch_questions: conversations that go on together; at most so many are played again after a kill.
    """

    prompt: str
    grammar: dict[str, Any]
    max_turns: Annotated[int, Field(ge=0, le=62)]
    top_k: Annotated[int, Field(ge=1, le=1000)]
    search_retries: Annotated[int, Field(ge=0, le=20)] = 2
    batch_questions: Annotated[int, Field(ge=1, le=4096)] = 32
    plays_policy: ClassVar[bool] = False
    services: ClassVar[tuple[Role, ...]] = ("chat",)

    def __post_init__(self) -> None:
        check_prompt(self.prompt, (PLACEHOLDER,))

    def loads(self) -> SearchGrammar:
        """The grammar, so that the plan finds its source file (`tasks.identity.modules_of`)."""
        return grammars.make(self.grammar, None, "grammar")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ChatAgent]:
        """See `tasks.systems.Kind`; the service is closed by who opened it."""
        yield ChatAgent(
            chat=resources.services["chat"],
            retriever=resources.retriever,
            grammar=self.loads(),
            prompt=Prompt(None, self.prompt),
            max_turns=self.max_turns,
            top_k=resources.top_k or self.top_k,
            search_retries=self.search_retries,
            batch_questions=self.batch_questions,
        )


PART = ChatAgentSettings
