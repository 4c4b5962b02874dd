"""Stage `retrievers`: a table of several retrievers with intervals, vectors encoded once, indexes not built twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import retrieval, store
from tasks.data.records import read_questions
from tasks.plan import RunSettings
from tasks.report.artifacts import read_retrievers
from tasks.retrieval import bm25, dense
from tasks.retrieval.recall import recall_table
from tasks.stages import retrievers
from tests.data.rows import lines, passage, question
from tests.retrieval.test_dense import HashEncoder
from tests.stages.clone import Clone

BM25 = "backend: bm25\nstemmer: snowball\n"
DENSE = "backend: dense\nshard_size: 4\n"
FILES = {
    "words": BM25,
    "vectors": DENSE,
    "both": "backend: hybrid\nparts:\n  words: {backend: bm25, stemmer: snowball}\n"
    "  vectors: {backend: dense, shard_size: 4}\n",
}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A stage context over 12 passages and 16 questions, three retrievers and an encoder that needs no model."""
    for name, text in FILES.items():
        path = tmp_path / "conf" / "retriever" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data = tmp_path / "artifacts" / "data"
    data.mkdir(parents=True)
    (data / "corpus.jsonl").write_text(lines([passage(n, text=f"Number {n} is a number.") for n in range(12)]))
    rows = [question(n, gold_passage_ids=[f"p{n % 12}"], gold_complete=True) for n in range(16)]
    (data / "questions.jsonl").write_text(lines(rows))
    encoder = HashEncoder()
    monkeypatch.setattr(dense, "SentenceEncoder", lambda *words: encoder)

    def make(*names: str) -> Any:
        params: Any = SimpleNamespace(compare_retrievers=names)
        return SimpleNamespace(
            settings=retrievers.settings(RunSettings(tmp_path, params)), root=tmp_path, scratch=tmp_path / "scratch",
            progress=retrieval.silent, log=lambda step, metrics: None, track_data=lambda purpose, num_rows: None,
            encoder=encoder, config_sha256="of the settings",
        )  # fmt: skip

    return make


def _table(root: Path) -> dict[str, Any]:
    return json.loads((root / "artifacts" / "retrievers.json").read_text())["retrievers"]


def test_an_empty_list_is_an_empty_table(context: Callable[..., Any]) -> None:
    ctx = context()
    retrievers.body(ctx)
    assert _table(ctx.root) == {}
    assert not ctx.scratch.exists()


def test_figures_are_those_of_the_recall_table_with_an_interval_around_each(context: Callable[..., Any]) -> None:
    ctx = context("words", "vectors", "both")
    retrievers.body(ctx)
    table = _table(ctx.root)
    assert list(table) == ["both", "vectors", "words"]  # As the keys of any JSON of ours.
    for name, found in table.items():
        settings = retrieval.load_settings(name, ctx.root)
        corpus, index = ctx.root / "artifacts/data/corpus.jsonl", ctx.root / "index"
        retrieval.build(corpus, index, settings)
        questions = read_questions(ctx.root / "artifacts/data/questions.jsonl")
        expected = recall_table(questions, retrieval.open_retriever(index, corpus))["d"]
        row = found["datasets"]["d"]
        assert row.pop("num_questions") == expected.pop("num_questions") == 16
        assert {key: figure["value"] for key, figure in row.items()} == expected
        for figure in row.values():
            assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1
            assert figure["low"] < figure["high"]
        assert found["backend"] == settings.backend
    assert len({found["settings_digest"] for found in table.values()}) == 3
    read = read_retrievers(ctx.root / "artifacts" / "retrievers.json")
    compared, differences = read.retrievers, read.differences
    assert read.config_sha256 == ctx.config_sha256
    assert compared["both"]["d"].keys() == {"num_questions", *expected}
    assert differences.keys() == {"vectors - words", "both - words", "both - vectors"}
    assert all(rows["d"].keys() == compared["both"]["d"].keys() for rows in differences.values())
    assert str(ctx.root) not in (ctx.root / "artifacts" / "retrievers.json").read_text()


def test_training_questions_are_told_apart_and_differences_are_paired(context: Callable[..., Any]) -> None:
    ctx = context("words", "vectors")
    path = ctx.root / "artifacts" / "data" / "questions.jsonl"
    rows = [
        question(n, split="train" if n < 6 else "dev", gold_passage_ids=[f"p{n % 12}"], gold_complete=True)
        for n in range(16)
    ]
    path.write_text(lines(rows))
    retrievers.body(ctx)
    tree = json.loads((ctx.root / "artifacts" / "retrievers.json").read_text())
    words, vectors = (tree["retrievers"][name]["datasets"] for name in ("words", "vectors"))
    assert {name: row["num_questions"] for name, row in words.items()} == {"d": 16, "d, held out": 10}
    retrieval.build(
        ctx.root / "artifacts/data/corpus.jsonl", ctx.root / "index", retrieval.load_settings("words", ctx.root)
    )
    held_out = (one for one in read_questions(path) if one.split == "dev")
    expected = recall_table(held_out, retrieval.open_retriever(ctx.root / "index"))["d"]
    assert {name: one["value"] for name, one in words["d, held out"].items() if name != "num_questions"} == {
        name: value for name, value in expected.items() if name != "num_questions"
    }
    assert list(tree["differences"]) == ["vectors - words"]
    for dataset, row in tree["differences"]["vectors - words"].items():
        for name in ("recall@3", "answer@5", "all_gold@10"):
            difference = vectors[dataset][name]["value"] - words[dataset][name]["value"]
            assert row[name]["value"] == pytest.approx(difference, abs=1e-6)
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]


def test_the_vectors_of_a_part_are_encoded_once(context: Callable[..., Any]) -> None:
    ctx = context("vectors", "both")
    retrievers.body(ctx)
    assert sum(text.startswith("Title ") for text in ctx.encoder.texts) == 12


def test_a_stage_that_was_stopped_builds_only_what_is_missing(
    context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context("words", "vectors", "both")
    retrievers.body(ctx)
    whole = (ctx.root / "artifacts" / "retrievers.json").read_bytes()
    (ctx.scratch / "index" / "both" / "manifest.json").unlink()
    torn = ctx.scratch / "index" / "vectors" / "passages.jsonl"
    torn.write_bytes(torn.read_bytes()[:-1])
    ctx.encoder.texts.clear()
    built: list[Path] = []
    monkeypatch.setattr(bm25, "build", lambda *given, build=bm25.build: built.append(given[2]) or build(*given))
    retrievers.body(ctx)
    assert len(built) == 1  # The part of `both`; the index of `words` was whole.
    assert not [text for text in ctx.encoder.texts if text.startswith("Title ")]
    assert (ctx.root / "artifacts" / "retrievers.json").read_bytes() == whole


@pytest.mark.slow
def test_the_stage_in_a_clone(tmp_path: Path) -> None:
    """Named in params.yaml, built in scratch, gone afterwards; an unknown name stops every stage."""
    clone = Clone.make(tmp_path / "clone")
    parts = "parts:\n  plain: {backend: bm25}\n  stemmed: {backend: bm25, stemmer: snowball}\n"
    (clone.root / "conf/retriever/two.yaml").write_text(f"backend: hybrid\n{parts}")
    clone.must("data", "validate", "index", "recall", "retrievers")
    assert _table(clone.root) == store.read_json(clone.root / "artifacts/retrievers.json")["differences"] == {}
    clone.set("compare_retrievers", "[bm25, two]")
    clone.must("retrievers")
    table = _table(clone.root)
    alone = store.read_json(clone.root / "artifacts/recall.json")["datasets"]["world"]
    row = table["bm25"]["datasets"]["world"]
    assert {key: value if key == "num_questions" else value["value"] for key, value in row.items()} == alone
    assert table["two"]["datasets"]["world"]["recall@10"]["value"] > 0.3
    assert not list((clone.root / ".scratch/work").glob("retrievers-*"))
    clone.set("compare_retrievers", "[bm25, tow]")
    done = clone.stage("retrievers")
    assert done.returncode == 1
    assert "unknown retriever 'tow'. Did you mean 'two'?" in done.stderr
