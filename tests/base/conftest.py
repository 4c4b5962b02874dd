"""A small generated world with its real BM25 index and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import retrieval
from tasks.data import world
from tasks.data.records import read_questions
from tasks.types import Question
from tests.base.small import SMALL, small_tokenizer

HOUSE = Path(__file__).parents[2]


@dataclass(frozen=True)
class SmallWorld:
    """Questions of all splits, the index over the passages, the tokenizer."""

    questions: list[Question]
    retriever: retrieval.Retriever
    tokenizer: Any


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> SmallWorld:
    """Made once: nothing in it is changed by a test."""
    folder = tmp_path_factory.mktemp("world")
    world.write_world(SMALL, folder)
    retrieval.build(folder / "corpus.jsonl", folder / "index", retrieval.load_settings("bm25", HOUSE))
    index = retrieval.open_retriever(folder / "index", folder / "corpus.jsonl")
    return SmallWorld(list(read_questions(folder / "questions.jsonl")), index, small_tokenizer())
