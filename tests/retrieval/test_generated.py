"""Documents written by a model: hits of their own kind, never an index and never a short answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import retrieval
from tasks.data.records import to_passage
from tasks.retrieval import RetrievalError
from tasks.retrieval.generated import GeneratedRetriever
from tasks.store import DataError


class Echo:
    """Writes the query and a number; `short` documents too few."""

    def __init__(self, short: int = 0, blank: bool = False) -> None:
        self.short, self.blank = short, blank

    def write(self, queries: list[str], top_k: int) -> list[list[str]]:
        return [[" " if self.blank else f"{q} {n}" for n in range(top_k - self.short)] for q in queries]


def test_written_documents_become_hits():
    [first, second] = GeneratedRetriever(Echo()).search(["a", "b"], 3)
    assert [(hit.score, hit.text, hit.title) for hit in first] == [
        (1.0, "a 0", ""),
        (0.5, "a 1", ""),
        (1 / 3, "a 2", ""),
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
        def write(self, queries: list[str], top_k: int) -> list[list[str]]:
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
