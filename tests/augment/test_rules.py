"""The writer by rules: on rows by hand, on the generated world, and on real MuSiQue questions."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tasks.augment.coherence import fault
from tasks.augment.rules import RulesWriter, key_words
from tasks.data import world
from tasks.data.decomposition import REFERENCE
from tasks.data.ingest import find_questions
from tasks.data.records import read_questions
from tasks.text import normalize
from tasks.types import Hop, Question
from tests.base.small import SMALL
from tests.skips import REAL, REAL_LIKE, needs_shared


def hops(question: Question) -> tuple[Hop, ...]:
    (found,) = RulesWriter().write([question])
    assert (found.question, found.rejection, found.tokens) == (question, None, 0)
    return found.hops


def test_triples_and_sentences() -> None:
    given = (
        Hop("Guangling District >> located in the territorial entity", "Yangzhou", "p1"),
        Hop("Where did #1 's lord greet the Karmapa ?", "Nanjing"),
        Hop("#2 >> capital of", "Ming", None, ("#2 dynasty",)),
    )
    question = Question("q", "musique", "train", "Which?", ("Ming",), 3, decomposition=given)
    assert hops(question) == (
        Hop(
            "What is the located in the territorial entity of Guangling District?", "Yangzhou", "p1",
            (
                "Guangling District located in the territorial entity",
                "Guangling District located territorial entity",
                "What is the located in the territorial entity of Guangling District",
            ),
        ),
        Hop(
            "Where did Yangzhou 's lord greet the Karmapa ?", "Nanjing", None,
            ("Yangzhou s lord greet Karmapa", "Where did Yangzhou 's lord greet the Karmapa"),
        ),
        Hop(
            "What is Nanjing capital of?", "Ming", None,
            ("Nanjing dynasty", "Nanjing capital of", "Nanjing capital", "What is Nanjing capital of"),
        ),
    )  # fmt: skip
    assert fault(question, hops(question)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("Who is it?", ""),
        ("Who is Zo\u00eb's mother-in-law?", "Zo\u00eb mother-in-law"),
        ("What did AT&T\u2019s CEO earn in 1999?", "AT&T CEO earn 1999"),
        ("\u6771\u4eac >> mayor", "\u6771\u4eac mayor"),
    ],
)
def test_key_words(text: str, words: str) -> None:
    assert key_words(text) == words


def _hold(questions: list[Question]) -> None:
    """What must be true of all hops, by rules alone."""
    for question in questions:
        found = hops(question)
        assert fault(question, found) is None
        assert [hop.answer for hop in found] == [hop.answer for hop in question.decomposition]
        assert [h.support_passage_id for h in found] == [h.support_passage_id for h in question.decomposition]
        for hop in found:
            assert not any(REFERENCE.search(text) or ">>" in text for text in (hop.question, *hop.queries))
            assert len({normalize(query) for query in hop.queries} - {""}) >= 1


def test_the_generated_world() -> None:
    questions = list(world.questions(SMALL))
    _hold(questions)
    for question in questions:
        for before, hop in itertools.pairwise(hops(question)):
            assert hop.queries[0].startswith(before.answer)


@pytest.mark.parametrize("folder", [REAL_LIKE, pytest.param(REAL, marks=needs_shared(REAL))], ids=["written", "shared"])
def test_real_questions(folder: Path) -> None:
    questions = [
        one for path in find_questions(folder) if path.parent.name == "musique" for one in read_questions(path)
    ]
    assert len(questions) > (3 if folder == REAL_LIKE else 1000)
    _hold(questions)
