"""A row of what another model answered from one source of text: a trained agent's evidence, or a plain search."""

from __future__ import annotations

from tasks.records.schema import Match, Share, row
from tasks.types import Hops, Text

ANSWERS, SUMMARY = "answers.jsonl", "summary.json"


@row
class ReadAnswer:
    """One question, answered from one source.

    Attributes:
        question_id, hops: of the question.
        source: what was read.
        answer: of the model; null where there was nothing to read.
        em, f1: exact match and word F1 of the answer.
    """

    question_id: Text
    hops: Hops
    source: Text
    answer: str | None
    em: Match
    f1: Share
