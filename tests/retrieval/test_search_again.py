"""Whoever searches for many questions goes on after a search that fails, and ends where it fails again and again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.augment.sources import Probe, Source
from tasks.retrieval import RetrievalError, search_again
from tasks.retrieval.recall import answered, recall_table
from tasks.tool.agent import Found
from tasks.tool.answers import sources
from tasks.tool.retriever import EvidenceRetriever
from tasks.types import Hop, Question
from tests.base.test_demonstrations import Flaky
from tests.retrieval.test_recall import Fixed

STEADY = Fixed({"a 1": ["g", "x"], "a 2": ["x", "y"]})
QUESTIONS = [Question(f"a/{number}", "a", "test", f"a {number}", ("g",), 1) for number in (1, 2)]
ASKED = [question.question for question in QUESTIONS]


def _agent(search: Any) -> Any:
    """An agent whose own searches do not fail."""
    found = Found("evidence", ("a 1",), (), False)
    batch = SimpleNamespace(batch_questions=1)
    return SimpleNamespace(find=lambda asked: [found] * len(asked), retriever=search, system=batch)


@pytest.mark.parametrize(
    "measure",
    [
        lambda search: recall_table(QUESTIONS, search),
        lambda search: answered(QUESTIONS, search, 3),
        lambda search: Source("s", search, False).valid([Probe(text, Hop(text, "g")) for text in ASKED], 2, "answer"),
        lambda search: sources(QUESTIONS, _agent(search), search, [1, 2]),
        lambda search: EvidenceRetriever(_agent(search), 9).search(ASKED, 3),
    ],
    ids=["recall", "answered", "augmentation", "what another model reads", "evidence"],
)
def test_one_search_that_fails_changes_nothing_and_three_end_it(
    measure: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(search_again, "__defaults__", (2, pauses.append))
    assert measure(Flaky(STEADY, [RetrievalError("half of the JSON")])) == measure(STEADY)
    assert pauses == [1.0]
    with pytest.raises(RetrievalError, match="down"):
        measure(Flaky(STEADY, [RetrievalError("down")] * 3))
    assert pauses == [1.0, 1.0, 2.0]
