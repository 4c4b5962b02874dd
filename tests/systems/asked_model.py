"""A kind of system that asks a chat model: it searches for the question once and sends what it finds along.

A search is retried; where it still fails, the episode is `failed` and the model is not asked. Greedy play asks at
temperature 0, sampled play at temperature 1 with a seed.

All that a prompted kind needs stands in this one file; put into `tasks/systems/` it can be named in `conf/system/`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from tasks.agent.searches import search_for_rows
from tasks.retrieval import RetrievalError, Retriever
from tasks.services import Chat, Messages, Refusal, Reply, Role
from tasks.services.replies import check_prompt, filled
from tasks.systems import Resources
from tasks.types import Action, Cost, Episode, Hit, Mode, Question, Turn

PASSAGES, QUESTION = "{passages}", "{question}"


@dataclass(frozen=True)
class AskedModel:
    """See the module."""

    chat: Chat
    retriever: Retriever
    num_passages: int
    prompt: str
    batch_questions: int = 8
    search_retries: int = 2
    sleep: Callable[[float], None] = time.sleep
    tokenizer: None = None

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> Iterator[Episode]:
        queries = {row: [question.question] for row, question in enumerate(questions)}
        found = search_for_rows(self.retriever, queries, self.num_passages, self.search_retries, self.sleep)
        hits = {row: result[0] for row, result in found.items() if not isinstance(result, RetrievalError)}
        messages = [self._messages(questions[row], hits[row]) for row in hits]
        request = {"temperature": 0} if mode == "greedy" else {"temperature": 1, "seed": seed}
        with closing(self.chat.replies(messages, request)) as replies:
            for row, question in enumerate(questions):
                if row in hits:
                    yield self._episode(question, hits[row], next(replies))
                else:
                    yield Episode(question.id, (), "failed", error=str(found[row]))

    def _messages(self, question: Question, hits: Sequence[Hit]) -> Messages:
        values = {PASSAGES: "\n".join(hit.text for hit in hits), QUESTION: question.question}
        return [{"role": "user", "content": filled(self.prompt, values)}]

    @staticmethod
    def _episode(question: Question, hits: Sequence[Hit], reply: Reply | Refusal) -> Episode:
        search = Turn(Action("search", question.question), executed=True, hits=tuple(hits))
        if isinstance(reply, Refusal):
            return Episode(question.id, (search,), "open", error=reply.detail)
        answer = Turn(Action("answer", reply.content), text=reply.content)
        return Episode(question.id, (search, answer), "answered", reply.content, cost=Cost(0, reply.tokens))


@dataclass(frozen=True)
class AskedModelSettings:
    """Passages of the one search, and the text that is sent: {passages} and {question} are replaced in it."""

    prompt: str
    num_passages: Annotated[int, Field(ge=1)] = 3
    plays_policy: ClassVar[bool] = False
    services: ClassVar[tuple[Role, ...]] = ("chat",)

    def __post_init__(self) -> None:
        check_prompt(self.prompt, (PASSAGES, QUESTION))

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[AskedModel]:
        """See `tasks.systems.Kind`; the service is closed by who opened it."""
        num_passages = resources.top_k or self.num_passages
        yield AskedModel(resources.services["chat"], resources.retriever, num_passages, self.prompt)


PART = AskedModelSettings
