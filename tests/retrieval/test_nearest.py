"""Index types: the protocol holds for approximate ones too, builds repeat and resume, vectors are encoded once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import conf, retrieval, store
from tasks.retrieval import dense, nearest, sealed
from tasks.retrieval import manifest as manifests
from tasks.retrieval.dense import Settings
from tasks.retrieval.nearest import Hnsw, Ivf, Pq
from tasks.retrieval.vectors import Shards
from tasks.store import DataError
from tests.retrieval.test_dense import HashEncoder

WORDS = "ash birch cedar date elm fir gum hazel ivy juniper kapok larch maple nutmeg oak pine".split()
NUM_PASSAGES = 700
KINDS = ("flat", "hnsw", "ivf_pq", "sq8", "ivf_sq8")


def _settings(kind: str, **changes: object) -> Settings:
    values = {"index": kind, "shard_size": 90, "hnsw": Hnsw(m=4), "ivf": Ivf(nlist=16, nprobe=1), "pq": Pq(bits=6)}
    return Settings("dense", **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random sentences, every seventh one a repetition of an earlier one."""
    rng, texts = random.Random(0), []
    for number in range(NUM_PASSAGES):
        texts.append(rng.choice(texts) if number % 7 == 6 else " ".join(rng.choices(WORDS, k=6)))
    path = tmp_path_factory.mktemp("trees") / "corpus.jsonl"
    store.write_jsonl(path, ({"id": f"p{i}", "title": "", "text": text} for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def scratch(path: Path) -> Path:
    return path.parent / "scratch"


def _build(path: Path, out: Path, config: Settings, scratch: Path | None, encoder: HashEncoder | None = None) -> dict:
    sha256 = manifests.corpus_sha256(path)
    with store.replacing_folder(out) as work:
        built = dense.build(path, sha256, work, config, scratch, retrieval.silent, encoder or HashEncoder())
        manifests.write(work, "dense", conf.plain(config), sha256, built)
    return built.details


def _open(out: Path) -> dense.DenseRetriever:
    return dense.open_index(out, manifests.read(out), encoder=HashEncoder())


@pytest.fixture(scope="module", params=KINDS)
def retriever(request, path, scratch) -> dense.DenseRetriever:
    _build(path, path.parent / request.param, _settings(request.param), scratch)
    return _open(path.parent / request.param)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queries=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join), min_size=1, max_size=5),
    top_k=st.one_of(st.integers(1, 70), st.sampled_from([200, NUM_PASSAGES - 1, NUM_PASSAGES, 10_000])),
)
def test_the_protocol_holds(retriever, queries, top_k):
    batch = retriever.search(queries, top_k)
    assert batch == [retriever.search([query], top_k)[0] for query in queries]
    for hits in batch:
        rows = [int(hit.passage_id[1:]) for hit in hits]
        assert len(set(rows)) == len(rows) == min(top_k, NUM_PASSAGES)
        keys = [(-hit.score, row) for hit, row in zip(hits, rows, strict=True)]
        assert keys == sorted(keys)
    if top_k <= 64:
        assert [hits[:top_k] for hits in retriever.search(queries, 64)] == batch


@pytest.mark.parametrize("kind", KINDS)
def test_two_builds_are_the_same_bytes_and_a_folder_can_be_moved(path, scratch, tmp_path, kind):
    for name in ("one", "two"):
        _build(path, tmp_path / name, _settings(kind), scratch)
    one, two = ({p.name: store.sha256(p) for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert not any(str(tmp_path).encode() in p.read_bytes() for p in (tmp_path / "one").iterdir())
    expected = _open(tmp_path / "one").search(["oak pine"], 3)
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert _open(tmp_path / "moved").search(["oak pine"], 3) == expected


def test_searching_every_list_is_searching_everything(path, scratch, tmp_path):
    _build(path, tmp_path / "flat", _settings("flat"), scratch)
    exact = _open(tmp_path / "flat").search(["oak pine", "ash"], 20)
    for kind in ("sq8", "ivf_sq8"):
        _build(path, tmp_path / kind, _settings(kind, ivf=Ivf(nlist=16, nprobe=16)), scratch)
        for hits, best in zip(_open(tmp_path / kind).search(["oak pine", "ash"], 20), exact, strict=True):
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in best], abs=0.02)  # 8 bits


def test_another_index_over_the_same_vectors_encodes_nothing(path, tmp_path):
    encoder = HashEncoder()
    _build(path, tmp_path / "index", _settings("flat", query_prefix="query: "), tmp_path / "scratch", encoder)
    assert len(encoder.texts) == NUM_PASSAGES
    others = [_settings(kind) for kind in KINDS] + [_settings("ivf_sq8", ivf=Ivf(nlist=4))]
    for config in others:
        encoder = HashEncoder()
        _build(path, tmp_path / "index", config, tmp_path / "scratch", encoder)
        assert len(encoder.texts) in (0, dense.PROBE_QUERIES)  # The recall probe's queries
    for changes in ({"passage_format": "p: {text}"}, {"max_tokens": 9}, {"batch_size": 2}, {"shard_size": 50}):
        encoder = HashEncoder()
        _build(path, tmp_path / "index", _settings("flat", **changes), tmp_path / "scratch", encoder)
        assert len(encoder.texts) == NUM_PASSAGES
    assert {folder.name.split("-")[0] for folder in (tmp_path / "scratch").iterdir()} == {"vectors"}


def test_shards_without_a_seal_are_taken_over_when_whole(path, tmp_path):
    config, scratch = _settings("flat"), tmp_path / "scratch"
    _build(path, tmp_path / "whole", config, scratch)
    shards = sorted(scratch.glob("vectors-*/shard-*.npy"))
    for shard in shards:  # As np.save leaves them
        vectors = np.load(shard)
        np.save(shard, vectors)
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    shards[2].write_bytes(shards[2].read_bytes() + b"more")
    np.save(shards[3], np.full_like(np.load(shards[3]), np.nan))
    encoder = HashEncoder()
    _build(path, tmp_path / "index", config, scratch, encoder)
    assert len(encoder.texts) == 3 * 90
    assert [sealed.state(shard) for shard in shards] == ["whole"] * 8
    assert store.sha256(tmp_path / "index" / nearest.FLAT) == store.sha256(tmp_path / "whole" / nearest.FLAT)
    damaged = bytearray(shards[4].read_bytes())
    damaged[300] ^= 1  # A bit of a number: the file has the right shape and size.
    shards[4].write_bytes(damaged)
    encoder = HashEncoder()
    _build(path, tmp_path / "index", config, scratch, encoder)
    assert len(encoder.texts) == 90


def _build_and_die(path: Path, out: Path, config: Settings, scratch: Path) -> None:
    save, blocks = sealed.save, itertools.count()

    def saving(file: Path, *parts: bytes) -> None:
        if file.name.startswith("block") and next(blocks) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save(file, *parts)

    sealed.save = saving  # type: ignore[assignment]
    nearest._BLOCK = 100
    _build(path, out, config, scratch)


def test_a_build_killed_while_filling_lists_resumes_to_the_same_bytes(path, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest, "_BLOCK", 100)
    _build(path, tmp_path / "whole", _settings("ivf_sq8"), scratch)
    arguments = (path, tmp_path / "index", _settings("ivf_sq8"), tmp_path / "scratch")
    process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    kept = {file: file.stat().st_ino for file in (tmp_path / "scratch").glob("index-*/*.faiss")}
    assert sorted(file.name for file in kept) == ["block-000000.faiss", "block-000001.faiss", "trained.faiss"]
    encoder = HashEncoder()
    _build(*arguments, encoder)
    assert len(encoder.texts) == dense.PROBE_QUERIES
    for file in (tmp_path / "whole").iterdir():
        assert store.sha256(tmp_path / "index" / file.name) == store.sha256(file), file.name


def test_the_probe_measures_recall_against_exact_search(path, scratch, tmp_path):
    few = _build(path, tmp_path / "few", _settings("ivf_sq8"), scratch)
    all_lists = _build(path, tmp_path / "all", _settings("ivf_sq8", ivf=Ivf(nlist=16, nprobe=16)), scratch)
    assert few["index"] == {"kind": "ivf_sq8", "parameters": {"nlist": 16, "nprobe": 1, "train_size": NUM_PASSAGES}}
    assert few["probe"]["num_queries"] == 200
    assert 0.5 < few["probe"]["recall@10"] < all_lists["probe"]["recall@10"] <= 1
    # By hand: the retriever's first ten against brute force. Repeated passages tie, so only scores can be compared.
    texts = [row["text"] for _, row in store.read_jsonl(path)]
    encoder = HashEncoder()
    vectors = encoder.encode([f". {text}" for text in texts], 1)
    rows = np.unique(np.linspace(0, NUM_PASSAGES - 1, 200).round().astype(int))
    queries = encoder.encode([texts[row] for row in rows], 1)
    best = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :10]
    found = _open(tmp_path / "few").search([texts[row] for row in rows], 10)
    shares = [
        len({int(h.passage_id[1:]) for h in hits} & set(b.tolist())) / 10 for hits, b in zip(found, best, strict=True)
    ]
    assert few["probe"]["recall@10"] == pytest.approx(np.mean(shares), abs=0.02)


def test_a_recall_below_the_bound_is_refused(path, scratch, tmp_path):
    with pytest.raises(DataError, match=r"min_recall=0.95: the ivf_sq8 index finds 0\.\d+ of the 10 best .* nprobe"):
        _build(path, tmp_path / "index", _settings("ivf_sq8", min_recall=0.95), scratch)
    assert not (tmp_path / "index").exists()
    raised = _settings("ivf_sq8", min_recall=0.95, ivf=Ivf(nlist=16, nprobe=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "_trained", None)  # More of the same lists: nothing is fitted again.
        _build(path, tmp_path / "index", raised, scratch)


@pytest.mark.parametrize(
    ("num_rows", "kind", "nlist"),
    [(1, "flat", None), (200_000, "flat", None), (200_001, "hnsw", None), (500_001, "ivf_sq8", 1024),
     (1_000_000, "ivf_sq8", 2048), (21_015_324, "ivf_sq8", 8192), (30_000_001, "ivf_pq", 8192)],
)  # fmt: skip
def test_auto_chooses_by_size(num_rows, kind, nlist):
    plan = nearest.plan("auto", num_rows, 384, Hnsw(), Ivf(), Pq())
    assert (plan.kind, plan.parameters.get("nlist")) == (kind, nlist)


def test_plans_that_cannot_be():
    with pytest.raises(DataError, match=r"nlist=50: more lists than the 40 passages"):
        nearest.plan("ivf_sq8", 40, 8, Hnsw(), Ivf(nlist=50), Pq())
    with pytest.raises(DataError, match=r"pq m=3: does not divide vectors of 8 numbers"):
        nearest.plan("ivf_pq", 4000, 8, Hnsw(), Ivf(), Pq(m=3))
    with pytest.raises(DataError, match=r"40 passages cannot fit codes of 8 bits"):
        nearest.plan("ivf_pq", 40, 8, Hnsw(), Ivf(), Pq())
    tree = {"backend": "dense", "hnsw": {"ef_search": 10}}
    with pytest.raises(ValueError, match=r"here: hnsw: ef_search=10: expected 64 or more"):
        conf.fill(Settings, tree, "here")
    assert nearest.plan("ivf_pq", 4000, 384, Hnsw(), Ivf(), Pq()).parameters["m"] == 96
    assert nearest.plan("ivf_sq8", 10, 384, Hnsw(), Ivf(), Pq()).parameters["nlist"] == 1


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 70), st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_and_samples_are_the_rows(tmp_path, num_rows, size, block, data):
    vectors = np.random.default_rng(num_rows).standard_normal((num_rows, 3)).astype(np.float32)
    shards = Shards(tmp_path, num_rows, 3, size)
    for number in range(len(shards)):
        shards.write(number, vectors[number * size : (number + 1) * size])
    found = [(first, part.copy()) for first, part in shards.blocks(block)]
    assert [first for first, _ in found] == list(range(0, num_rows, block))
    assert (np.concatenate([part for _, part in found]) == vectors).all()
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, num_rows - 1)))), dtype=np.int64)
    assert (shards.take(rows) == vectors[rows]).all()
    exact = nearest.exact_rows(shards, vectors[:2], min(num_rows, 4))
    assert (exact[:, 0] == (vectors[:2] @ vectors.T).argmax(1)).all()
