"""Kinds of errors: what went wrong in a wrong answer, told from its scores alone.

A search error and a reading error both score 0. Which of the two it was shows in what the searches returned: without
the answer in any passage the policy could not know it, with the answer it read badly. No judge decides.
"""

from __future__ import annotations

from typing import Literal

from tasks import text
from tasks.records.scores import ScoreRow

Kind = Literal["failed", "no_answer", "near_miss", "not_found", "not_shown", "not_read", "unclear"]

KINDS: dict[Kind, str] = {
    "failed": "a search failed",
    "no_answer": "turns or tokens ran out before an answer, or it is empty",
    "near_miss": "the answer contains a gold answer, or has an F1 above 0.5",
    "not_found": "no returned passage holds a gold answer",
    "not_shown": "a returned passage holds one, but it was cut off before the policy could read it",
    "not_read": "the policy was shown a gold answer, and answered something else",
    "unclear": "the gold answer is yes, no or shorter than 3 characters, and says nothing about passages",
}
"""Kind -> what it means. The first that applies is the kind of a wrong answer."""

_NEAR = 0.5


def kind_of(row: ScoreRow) -> Kind | None:
    """The kind of a wrong answer; None for a right one."""
    if row.em:
        return None
    if row.status == "failed":
        return "failed"
    if row.status != "answered" or not text.normalize(row.answer or ""):
        return "no_answer"
    # A gold answer may lie inside a longer word by chance, as “no” does in “not”: a common word is asked for, too.
    if row.f1 > _NEAR or (row.subem and row.f1):
        return "near_miss"
    return _passage_kind(row)


def _passage_kind(row: ScoreRow) -> Kind:
    if row.answer_in_passage is None:
        return "unclear"
    if not row.answer_in_passage:
        return "not_found"
    return "not_read" if row.answer_shown else "not_shown"
