"""Documents written by a model: hits of their own kind, never an index and never a short answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks import retrieval
from tasks.data.records import to_passage
from tasks.retrieval import RetrievalError
from tasks.retrieval.generated import Document, GeneratedRetriever, Request
from tasks.store import DataError


class Echo:
    """Writes the query and a number; `short` documents too few."""

    def __init__(self, short: int = 0, blank: bool = False) -> None:
        self.short, self.blank = short, blank

    def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
        kinds = {True: "useful", False: "noisy"}
        return [
            [(kinds[useful], " " if self.blank else f"{q} {n}") for n in range(top_k - self.short)]
            for q, useful in requests
        ]


def test_written_documents_become_hits():
    [first, second] = GeneratedRetriever(Echo()).search(["a", "b"], 3)
    assert [(hit.score, hit.text, hit.title) for hit in first] == [
        (1.0, "a 0", "useful"),
        (0.5, "a 1", "useful"),
        (1 / 3, "a 2", "useful"),
    ]
    ids = [hit.passage_id for hit in (*first, *second)]
    assert len(set(ids)) == 6
    assert GeneratedRetriever(Echo()).search(["b"], 2) == [second[:2]]
    assert GeneratedRetriever(Echo()).search([], 2) == []
    for name in ids:
        with pytest.raises(
            DataError, match=r"found 'generated:.*, expected an id that does not begin with 'generated:'"
        ):
            to_passage({"id": name, "title": "", "text": "x"}, "corpus.jsonl: row 1")


def test_a_writer_that_fails_or_writes_too_little_is_an_error():
    class Down:
        def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
            raise RuntimeError("no answer")

    for writer, message in (
        (Down(), "generated: nothing was written: RuntimeError: no answer"),
        (Echo(short=1), "found 1 documents, 1 of them with text, expected 2 for query 'q'"),
        (Echo(blank=True), "found 2 documents, 0 of them with text, expected 2"),
    ):
        with pytest.raises(RetrievalError, match=message):
            GeneratedRetriever(writer).search(["q"], 2)
    with pytest.raises(ValueError, match="top_k=0"):
        GeneratedRetriever(Echo()).search(["q"], 0)


def test_there_is_nothing_to_build(corpus, town_passages, tmp_path: Path):
    (tmp_path / "conf" / "retriever").mkdir(parents=True)
    (tmp_path / "conf" / "retriever" / "written.yaml").write_text("backend: generated\n")
    settings = retrieval.load_settings("written", tmp_path)
    with pytest.raises(DataError, match="backend=generated: writer='none', so nobody writes documents"):
        retrieval.build(corpus(town_passages), tmp_path / "index", settings)
    assert not (tmp_path / "index").exists()
