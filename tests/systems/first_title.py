"""A kind of system that is no policy: it searches for the question and answers with the first passage's title.

All that a kind needs stands in this one file; put into `tasks/systems/` it can be named in `conf/system/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from tasks.retrieval import RetrievalError, Retriever
from tasks.services import Role
from tasks.systems import Resources
from tasks.types import Action, Episode, Hit, Mode, Question, Turn


@dataclass(frozen=True)
class FirstTitle:
    """See the module. It draws nothing, so that mode and seed make no difference."""

    retriever: Retriever
    num_passages: int = 2
    batch_questions: int = 4
    tokenizer: None = None

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> Iterator[Episode]:
        for question in questions:
            try:
                (hits,) = self.retriever.search([question.question], self.num_passages)
            except RetrievalError as error:
                yield Episode(question.id, (), "failed", error=str(error))
                continue
            yield self._episode(question, hits)

    @staticmethod
    def _episode(question: Question, hits: Sequence[Hit]) -> Episode:
        title = hits[0].title
        search = Turn(
            Action("search", question.question),
            text=f"<think>What is <b>known</b>?</think><search>{question.question}</search>",
            observation="\n".join(hit.text for hit in hits),
            executed=True,
            hits=tuple(hits),
        )
        answer = Turn(Action("answer", title), text=f"<answer>{title}</answer>")
        return Episode(question.id, (search, answer), "answered", title)


@dataclass(frozen=True)
class FirstTitleSettings:
    """How many passages it looks at; it answers with the first one's title."""

    num_passages: Annotated[int, Field(ge=1)] = 2
    plays_policy: ClassVar[bool] = False
    services: ClassVar[tuple[Role, ...]] = ()

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[FirstTitle]:
        """See `tasks.systems.Kind`; nothing has to be closed."""
        yield FirstTitle(resources.retriever, resources.top_k or self.num_passages)


PART = FirstTitleSettings
