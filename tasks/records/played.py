"""Rows of played and of labelled trajectories, from which a reward model learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tasks.records.schema import Count, row
from tasks.types import ActionKind, Episode, Flag, Hops, Question, Status, Text

PLAYED, LABELS, SUMMARY, SAMPLES = "trajectories.jsonl", "labels.jsonl", "summary.json", "samples.jsonl"
Part = Literal["train", "validation", "held_out"]
"""What a question is for: weights, the end of training, or the figures that are reported."""
Label = Literal["+", "-"]
"""Whether a search is a pivot."""


@row
class PlayedTurn:
    """One turn; `executed` where it was a search whose result was read."""

    kind: ActionKind
    content: str
    queries: list[str]
    text: str
    observation: str
    executed: Flag


@row
class PlayedRow:
    """One play of a question.

    Attributes:
        question_id, question, answers: of the question.
        copy: number of the play.
        part: what the question is for.
        status, answer: how it ended.
        is_right: whether the answer is an exact match.
        turns: in order.
    """

    question_id: Text
    question: Text
    answers: Annotated[list[Text], Field(min_length=1)]
    copy: Count
    part: Part
    status: Status
    answer: str | None
    is_right: Flag
    turns: list[PlayedTurn]

    @property
    def searches(self) -> list[PlayedTurn]:
        """The turns that a label is given to."""
        return [turn for turn in self.turns if turn.executed]


@row
class LabelRow:
    """One labelled play: a `PlayedRow` with a label for each executed search, in order.

    Attributes:
        hops: number of golden hops of the question.
        golden: the golden hops in words, sub-question and sub-answer.
        labels: one for each executed search.
        reason: what the labeller said, empty where it is a rule.
    """

    question_id: Text
    question: Text
    copy: Count
    part: Part
    status: Status
    answer: str | None
    is_right: Flag
    hops: Hops
    golden: list[Text]
    labels: list[Label]
    reason: str
    turns: list[PlayedTurn]


def played_row(episode: Episode, question: Question, copy: int, part: Part, is_right: bool) -> PlayedRow:
    """The row of one played question."""
    turns = [
        PlayedTurn(
            kind=turn.action.kind,
            content=turn.action.content,
            queries=list(turn.action.queries),
            text=turn.text,
            observation=turn.observation,
            executed=turn.executed,
        )
        for turn in episode.turns
    ]
    return PlayedRow(
        question_id=question.id,
        question=question.question,
        answers=list(question.answers),
        copy=copy,
        part=part,
        status=episode.status,
        answer=episode.answer,
        is_right=is_right,
        turns=turns,
    )
