"""Kinds of errors: every wrong answer has exactly one, a right one has none, and each is told apart by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate.errors import KINDS, kind_of
from tasks.records.scores import ScoreRow

WRONG: dict[str, Any] = {
    "question_id": "d/1", "dataset": "d", "split": "test", "hops": 2, "type": None, "mode": "greedy", "em": 0.0,
    "f1": 0.0, "subem": 0.0, "searches": 1, "actions": 2, "valid_actions": 2, "recall": None, "answer_in_passage": 1.0,
    "answer_shown": 1.0, "status": "answered", "generated_tokens": 9, "prefill_tokens": 20, "answer": "Name",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"em": 1.0, "f1": 1.0, "subem": 1.0}, None),
        ({}, "not_read"),
        ({"answer_shown": 0.0}, "not_shown"),
        ({"answer_in_passage": 0.0, "answer_shown": 0.0}, "not_found"),
        ({"answer_in_passage": None, "answer_shown": None}, "unclear"),
        ({"f1": 0.6}, "near_miss"),
        ({"f1": 0.5}, "not_read"),  # John Adams for John Smith.
        ({"f1": 0.2, "subem": 1.0}, "near_miss"),
        ({"subem": 1.0}, "not_read"),  # "no" in "not known".
        ({"f1": 0.6, "answer_in_passage": 0.0, "answer_shown": 0.0}, "near_miss"),
        ({"status": "open", "answer": None}, "no_answer"),
        ({"status": "overflow", "answer": None}, "no_answer"),
        ({"answer": "..."}, "no_answer"),
        ({"answer": None}, "no_answer"),
        ({"status": "failed", "answer": None}, "failed"),
        ({"status": "failed", "answer": "Name", "answer_in_passage": None, "answer_shown": None}, "failed"),
    ],
)
def test_kinds_by_hand(changes: dict[str, Any], kind: str | None) -> None:
    assert kind_of(ScoreRow(**WRONG | changes)) == kind


share, match = st.floats(0, 1), st.sampled_from([0.0, 1.0])


@given(
    em=match, f1=share, subem=match, answer_in_passage=st.none() | match, answer_shown=st.none() | match,
    status=st.sampled_from(["answered", "open", "overflow", "failed"]), answer=st.none() | st.text(max_size=4),
    searches=st.integers(0, 4),
)  # fmt: skip
def test_every_wrong_answer_has_one_kind_and_a_right_one_none(**values: Any) -> None:
    row = ScoreRow(**WRONG | values)
    kind = kind_of(row)
    assert (kind is None) == (row.em == 1)
    assert kind is None or kind in KINDS
    assert (kind == "failed") == (row.em == 0 and row.status == "failed")
    # Search errors and reading errors never mix, whatever else is true of a row.
    assert kind not in ("not_read", "not_shown") or row.answer_in_passage == 1
    assert kind != "not_found" or row.answer_in_passage == 0
