"""A reward model's request and answer as JSON texts, which an OpenAI-compatible chat request carries.

So retries, budgets, caches and recordings of chat models serve reward models, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tasks import conf
from tasks.services import Head, Probabilities
from tasks.store import dump
from tasks.types import Action, Question, Trajectory, Turn


@dataclass(frozen=True)
class _Turn:
    """What is read of a turn."""

    text: str
    observation: str
    executed: bool


@dataclass(frozen=True)
class _Request:
    """A question and the turns of its play."""

    question: str
    turns: tuple[_Turn, ...]


@dataclass(frozen=True)
class Answer:
    """The schema of an answer.

    Attributes:
        head: what the numbers mean.
        before, after: see `Probabilities`.
    """

    head: Head
    before: conf.Share
    after: tuple[conf.Share | None, ...]


def request(question: str, turns: Sequence[Turn]) -> str:
    """The text of a request; `play` inverts it."""
    read = tuple(_Turn(turn.text, turn.observation, turn.executed) for turn in turns)
    return dump(conf.plain(_Request(question, read)))


def play(text: str) -> tuple[Trajectory, Question]:
    """The play in a request.

    Raises:
        ValueError: the text is another one.
    """
    found = conf.fill(_Request, json.loads(text), "request")
    turns = tuple(
        Turn(Action("search"), text=one.text, observation=one.observation, executed=one.executed) for one in found.turns
    )
    return Trajectory("q", "g", (), (), (), (), turns, "open"), Question("q", "q", "train", found.question, ("-",), 1)


def answer(found: Probabilities, head: Head) -> str:
    """The text of an answer, with every digit."""
    return dump(conf.plain(Answer(head, found.before, found.after)))
