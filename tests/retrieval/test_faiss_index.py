"""A FAISS index that exists is taken over, and one of another corpus, order, encoder or text is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from tasks import conf, retrieval, store
from tasks.retrieval import dense, faiss_index
from tasks.retrieval import manifest as manifests
from tasks.retrieval.encoders import passage_text
from tasks.retrieval.faiss_index import Settings
from tasks.retrieval.passages import read_corpus
from tasks.store import DataError
from tests.retrieval.test_dense import HashEncoder

NUM = 400
FORM = "passage: {title}\n{text}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [
        {"id": f"p{i}", "title": f"title{i}", "text": " ".join(draw.choice(words, 12).tolist())} for i in range(NUM)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def vectors_of(corpus: Path, form: str = FORM) -> Any:
    return HashEncoder().encode([passage_text(form, passage) for passage in read_corpus(corpus)], 32)


def made(kind: str, vectors: Any, path: Path) -> Path:
    """An index of somebody else's."""
    dimension, metric = vectors.shape[1], faiss.METRIC_INNER_PRODUCT
    index = faiss.index_factory(dimension, kind, metric)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def take_over(corpus: Path, out: Path, settings: Settings, encoder: Any = None) -> Any:
    with store.replacing_folder(out) as work:
        sha = manifests.corpus_sha256(corpus)
        built = faiss_index.build(corpus, sha, work, settings, None, retrieval.silent, encoder or HashEncoder())
        manifests.write(work, "faiss_index", conf.plain(settings), sha, built)
    return faiss_index.open_index(out, manifests.read(out), encoder=encoder or HashEncoder())


@pytest.mark.parametrize("kind", ["Flat", "IVF16,Flat", "HNSW16", "IVF8,SQ8", "SQ8"])
def test_its_hits_are_those_of_the_vectors(kind: str, corpus: Path, tmp_path: Path) -> None:
    path = made(kind, vectors_of(corpus), tmp_path / "e5.index")
    content = path.read_bytes()
    found = take_over(corpus, tmp_path / "out", Settings("faiss_index", str(path), nprobe=16, passage_format=FORM))

    plain = dense.Settings("dense", passage_format=FORM, index="flat")
    with store.replacing_folder(tmp_path / "flat") as work:
        sha = manifests.corpus_sha256(corpus)
        built = dense.build(corpus, sha, work, plain, None, retrieval.silent, HashEncoder())
        manifests.write(work, "dense", conf.plain(plain), sha, built)
    exact = dense.open_index(tmp_path / "flat", manifests.read(tmp_path / "flat"), encoder=HashEncoder())

    queries = ["w1 w2 w3", "title7", "w250"]
    ours, theirs = found.search(queries, 5), exact.search(queries, 5)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == 5
        same = {hit.passage_id for hit in mine} & {hit.passage_id for hit in other}
        assert len(same) == 5 if kind in ("Flat", "HNSW16", "IVF16,Flat") else len(same) >= 4
    assert path.read_bytes() == content
    assert found.search(queries, NUM + 5)[0][-1].passage_id
    assert not list((tmp_path / "out").glob("*.index")), "the index stays where it is"


def test_what_does_not_belong_to_the_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    vectors = vectors_of(corpus)
    out, cases = tmp_path / "out", {
        "another order": (vectors[::-1], r"of 64 passages of .*, \d% are among the first 10 hits of their own vectors"),
        "another text": (vectors_of(corpus, "{title}"), r"are among the first 10 hits"),
        "too few": (vectors[:-1], "399 vectors, and the corpus has 400 passages"),
        "shorter": (vectors[:, :8], "vectors of 8 numbers, and the encoder makes 16"),
    }  # fmt: skip
    for name, (given, message) in cases.items():
        path = made("Flat", np.ascontiguousarray(given), tmp_path / f"{name}.index")
        with pytest.raises(DataError, match=message):
            take_over(corpus, out, Settings("faiss_index", str(path), passage_format=FORM))
        assert not out.exists()

    index = faiss.IndexFlatL2(16)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "l2"))
    (tmp_path / "text").write_text("no index")
    for name, message in (("l2", "expected 0, the inner product"), ("text", "not a FAISS index"), ("none", "no such")):
        with pytest.raises(DataError, match=message):
            take_over(corpus, out, Settings("faiss_index", str(tmp_path / name), passage_format=FORM))


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40])
def test_vectors_of_somebody_else_are_refused_however_few_passages_there_are(count: int, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "title": f"title{i}", "text": f"w{i} w{i + 1}"} for i in range(count)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = Settings("faiss_index", str(tmp_path / "given.index"), passage_format=FORM)
    vectors = vectors_of(corpus)
    for kind in ("Flat", "SQ8"):
        made(kind, vectors, tmp_path / "given.index")
        assert len(take_over(corpus, tmp_path / "out", settings).search(["title0"], 5)[0]) == min(5, count)
    noise = np.random.default_rng(count).standard_normal(vectors.shape).astype(np.float32)
    for strange in (noise / np.linalg.norm(noise, axis=1, keepdims=True), 3 * vectors):
        made("Flat", strange, tmp_path / "given.index")
        with pytest.raises(DataError, match="are among the first 10 hits of their own vectors"):
            take_over(corpus, tmp_path / "none", settings)


def test_a_file_or_encoder_that_has_changed_since_is_refused(corpus: Path, tmp_path: Path) -> None:
    path = made("Flat", vectors_of(corpus), tmp_path / "e5.index")
    settings = Settings("faiss_index", str(path), passage_format=FORM)
    take_over(corpus, tmp_path / "out", settings)
    manifest = manifests.read(tmp_path / "out")
    with pytest.raises(DataError, match="built with another encoder"):
        faiss_index.open_index(tmp_path / "out", manifest, encoder=HashEncoder("other"))
    made("SQ8", vectors_of(corpus), path)
    with pytest.raises(DataError, match=r"bytes, and .*manifest.json was made for an index of [\d,]+\. Put that one"):
        faiss_index.open_index(tmp_path / "out", manifest, encoder=HashEncoder())
    path.unlink()
    with pytest.raises(DataError, match=r"no such file\. Set `path`"):
        faiss_index.open_index(tmp_path / "out", manifest, encoder=HashEncoder())


def test_settings_of_the_shipped_file() -> None:
    assert isinstance(retrieval.load_settings("faiss_index"), Settings)
