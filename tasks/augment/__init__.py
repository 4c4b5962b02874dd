"""Writes and checks sub-questions, their answers and reference queries for training questions.

A writer turns a question's decomposition into coherent sub-question/answer pairs with N search
queries each, every query is sent to M sources, and it stays where at least ceil(M/2) of them return a valid result.
The paper gives neither N nor M, and does not say what is valid; all three are settings here. Nothing is repaired and
nothing is lost: what is left out is written down with its question, hop, query and reason.
StepSearch Section 2.1 (arXiv 2505.15107; docs/methods/stepsearch.md)
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from tasks.types import Hop, Question


@dataclass(frozen=True)
class Rejection:
    """The reason why a question, or one query of it, was left out.

    Attributes:
        stage: `write` (no usable reply), `coherence` (hops that do not fit the question), `query` (blank, repeated or
            surplus) or `search` (too few sources found something).
        reason: a word or two, under which rejections are counted.
        detail: what was found and expected, for a reader.
        hop: from 1; None for the question as a whole.
        query: the query; None for the hop or the question as a whole.
    """

    stage: str
    reason: str
    detail: str = ""
    hop: int | None = None
    query: str | None = None


@dataclass(frozen=True)
class Written:
    """A writer's result for one question: hops with queries, or the reason why there are none.

    Attributes:
        tokens: cost of the reply, also if it came from the cache; 0 if no model wrote it.
    """

    question: Question
    hops: tuple[Hop, ...] = ()
    rejection: Rejection | None = None
    tokens: int = 0


class Writer(Protocol):
    """Makes resolved hops with queries from questions that have a decomposition."""

    def write(self, questions: Iterable[Question]) -> Generator[Written, None, None]:
        """One `Written` per question, in the order of the questions, which are read as needed.

        Raises:
            ServiceError: the model cannot be used now; its earlier replies are kept.
        """
        ...
