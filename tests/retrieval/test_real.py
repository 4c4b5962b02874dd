"""BM25 on the real corpus against the reference figures that came with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import retrieval, store
from tasks.data.records import UnscorableError, to_question
from tasks.retrieval.bm25 import Settings
from tasks.retrieval.recall import recall_table
from tasks.types import Question

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "real"

REFERENCE = {
    "none": {
        "musique": (36.8, 41.1, 47.6, 13.1), "hotpotqa": (62.8, 71.0, 81.4, 64.0),
        "2wikimultihopqa": (59.4, 63.9, 68.3, 36.8), "popqa": (72.9, 87.8, 92.9, 92.9), "nq": (59.9, 70.6, 79.9, 79.9),
    },
    "snowball": {
        "musique": (37.1, 41.6, 47.3, 13.3), "hotpotqa": (64.8, 72.5, 82.9, 66.8),
        "2wikimultihopqa": (59.4, 63.9, 68.4, 37.0), "popqa": (71.7, 87.4, 91.7, 91.7), "nq": (62.1, 73.7, 82.5, 82.5),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real data is not on this machine")
@pytest.mark.parametrize("stemmer", ["none", "snowball"])
def test_recall_on_the_real_corpus(tmp_path, stemmer):
    corpus = REAL / "corpus.jsonl.gz"
    manifest = retrieval.build(corpus, tmp_path / "index", Settings("bm25", stemmer=stemmer))
    assert manifest["num_passages"] == 68_432
    retriever = retrieval.open_retriever(tmp_path / "index", corpus)
    table = recall_table((q for name in REFERENCE[stemmer] for q in _labelled(name)), retriever)
    for dataset, reference in REFERENCE[stemmer].items():
        names = ("recall@3", "recall@5", "recall@10", "all_gold@10")
        found = [100 * table[dataset][name] for name in names]
        assert found == pytest.approx(reference, abs=0.5), dataset


def _labelled(dataset: str) -> Iterator[Question]:
    path = REAL / dataset / "questions.jsonl.gz"
    for number, row in store.read_jsonl(path):
        try:
            question = to_question(row, f"{path}: row {number}")
        except UnscorableError:
            continue
        if question.gold_complete:
            yield question
