"""Elasticsearch as a backend, against real servers: content, order, aliases, kills, and what refusals say."""

from __future__ import annotations

import hashlib
import http.server
import json
import multiprocessing
import os
import random
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import conf, retrieval, store
from tasks.data.records import UnscorableError, to_question
from tasks.generate import Sampling
from tasks.retrieval import RetrievalError, bm25, elastic_load, elastic_server, elasticsearch
from tasks.retrieval import manifest as manifests
from tasks.retrieval.elastic_load import index_body, index_name
from tasks.retrieval.elastic_server import CA_CERTS, KEY, URL, Access, Cluster, access
from tasks.retrieval.elasticsearch import Settings
from tasks.retrieval.fusion import fuse
from tasks.retrieval.recall import recall_table
from tasks.store import DataError
from tasks.types import Hit, Question
from tests.retrieval import elastic
from tests.retrieval.elastic import Node, Server, free_port
from tests.skips import REAL, needs_shared
from tests.stages.clone import Clone

node, own_server, server, three_nodes = elastic.node, elastic.own_server, elastic.server, elastic.three_nodes

servers = pytest.mark.servers


class HashEncoder:
    """Unit vectors from the words of a text; remembers what it was given."""

    dimension = 16

    def __init__(self, sha256: str = "hash-encoder") -> None:
        self.sha256 = sha256
        self.texts: list[str] = []

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        self.texts += texts
        vectors = np.array([sum(map(self._word, text.lower().split() or [""])) for text in texts], dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _word(self, word: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
        return np.random.default_rng(seed).standard_normal(self.dimension)


def made(alias: str, **changes: Any) -> Settings:
    """Settings with short waits."""
    return Settings("elasticsearch", alias=alias, **{"retry_s": 60.0, "request_timeout_s": 10.0, **changes})


def load(
    corpus: Path, out: Path, settings: Settings, encoder: Any = None, progress: Any = retrieval.silent
) -> dict[str, Any]:
    """As `retrieval.build`, with an encoder of our own."""
    with store.replacing_folder(out) as work:
        sha = manifests.corpus_sha256(corpus)
        built = elasticsearch.build(corpus, sha, work, settings, None, progress, encoder)
        manifest = manifests.write(work, "elasticsearch", conf.plain(settings), sha, built)
    return dict(conf.plain(manifest))


def opened(out: Path, encoder: Any = None) -> elasticsearch.ElasticsearchRetriever:
    """As `retrieval.open_retriever`, with an encoder of our own."""
    return elasticsearch.open_index(out, manifests.read(out), encoder=encoder)


def loaded(corpus: Path, out: Path, settings: Settings, encoder: Any = None) -> elasticsearch.ElasticsearchRetriever:
    """Load and open."""
    load(corpus, out, settings, encoder)
    return opened(out, encoder)


def names(hits: Iterable[Hit]) -> list[str]:
    """Ids in order."""
    return [hit.passage_id for hit in hits]


def numbered(count: int) -> list[tuple[str, str]]:
    """Passages, each with a word only it has."""
    return [(f"Title {i}", f"word{i} stands beside others here") for i in range(count)]


# What comes back


@servers
def test_score_by_hand_whatever_the_shards(corpus, server, tmp_path):
    """Two passages of 3 and 1 terms; "apple" is in one of them, twice (see test_bm25: 0.341242).

    The server keeps the factor k1 + 1 = 2.5 of the original formula: 0.853106.
    """
    path = corpus([("", "apple apple pear"), ("", "plum")])
    for shards in (1, 3):
        retriever = loaded(path, tmp_path / f"index-{shards}", made(server.alias, shards=shards))
        first, second = retriever.search(["apple"], 2)[0]
        assert (first.passage_id, second.passage_id, second.score) == ("p0", "p1", 0.0)
        assert first.score == pytest.approx(0.853106, abs=1e-5)


@servers
def test_hits_follow_our_own_bm25(corpus, town_passages, server, tmp_path):
    path = corpus(town_passages)
    plain = {"title_weight": 2, "k1": 0.9, "b": 0.4}
    settings = made(server.alias, analyzer="standard", shards=2, search_batch=2, **plain)
    retriever = loaded(path, tmp_path / "index", settings)
    ours = bm25.Settings("bm25", stopwords="none", stemmer="none", **plain)
    retrieval.build(path, tmp_path / "bm25", ours)
    queries = [
        "city of Switzerland",
        "river river",
        "Zürich BERN",
        "Zu\u0308rich",
        "東京",
        "nowhere",
        "",
        "mountains",
    ]
    expected = retrieval.open_retriever(tmp_path / "bm25").search(queries, 4)
    found = retriever.search(queries, 4)
    for query, hits, others in zip(queries, found, expected, strict=True):
        assert [(hit.title, hit.text) for hit in hits] == [town_passages[int(name[1:])] for name in names(hits)]
        if query == "東京":  # Ours looks for the word, the server for its two signs.
            assert names(hits)[0] == names(others)[0] == "p6"
            continue
        assert names(hits) == names(others), query
        # The server counts words of one letter, and rounds the length of the one passage with more than 40.
        assert [hit.score for hit in hits] == pytest.approx([hit.score * 1.9 for hit in others], rel=0.05)


@servers
def test_order_counts_and_bounds(corpus, server, tmp_path):
    passages = [("", "same words here") for _ in range(60)] + [("", "same words here best")]
    retriever = loaded(corpus(passages), tmp_path / "index", made(server.alias, shards=3, chunk_size=7, search_batch=3))
    assert names(retriever.search(["words best"], 4)[0]) == ["p60", "p0", "p1", "p2"]
    assert names(retriever.search(["same"], 61)[0])[:60] == [f"p{i}" for i in range(60)]
    for hits in retriever.search(["", "the", "?!", "unheardof"], 3):
        assert [(hit.passage_id, hit.score) for hit in hits] == [("p0", 0.0), ("p1", 0.0), ("p2", 0.0)]
    best = retriever.search(["best"], 3)[0]
    assert names(best) == ["p60", "p0", "p1"]
    assert best[0].score > best[1].score == 0.0
    assert len(retriever.search(["best"], 9_999)[0]) == len(set(names(retriever.search(["same"], 100)[0]))) == 61
    assert retriever.search([], 3) == []
    with pytest.raises(ValueError, match="top_k=0: expected at least 1"):
        retriever.search(["city"], 0)
    many = [f"words {i % 5} best" for i in range(20)]
    assert retriever.search(many, 5) == [retriever.search([query], 5)[0] for query in many]


@servers
def test_queries_no_server_would_take(corpus, town_passages, server, tmp_path):
    """Thousands of words or signs, half characters, control characters: each still gets its hits."""
    retriever = loaded(corpus(town_passages), tmp_path / "index", made(server.alias))
    queries = [
        "river " + " ".join(f"word{i}" for i in range(10_000)),
        "river " * 5_000,
        "river " + "語" * 10_000,
        "river " + "☃!" * 5_000,
        "river " + "x" * 300_000,
        "river \ud800 \x00 🚢",
        'river "} {"index": "*"}',
    ]
    for hits in retriever.search(queries, 2):
        assert sorted(names(hits)) == ["p2", "p9"]


@servers
def test_vectors_against_brute_force(corpus, town_passages, server, tmp_path):
    settings = made(
        server.alias, mode="knn", query_prefix="query: ", passage_format="passage: {title}\n{text}", shards=2
    )
    queries = ["city of Switzerland", "", "river", "Equal mountains"]
    encoder = HashEncoder()
    passages = encoder.encode([f"passage: {title}\n{text}" for title, text in town_passages], 1)
    expected = encoder.encode([f"query: {query}" for query in queries], 1) @ passages.T
    for kind in ("flat", "hnsw"):
        retriever = loaded(corpus(town_passages), tmp_path / kind, replace(settings, vectors=kind), HashEncoder())
        for hits, scores in zip(retriever.search(queries, 99), expected, strict=True):
            rows = [int(name[1:]) for name in names(hits)]
            assert sorted(rows) == list(range(10))
            assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1], abs=1e-4)
            assert rows.index(3) < rows.index(4)  # The twins tie: corpus order.
        assert [names(hits) for hits in retriever.search(queries, 3)] == [
            names(hits)[:3] for hits in retriever.search(queries, 10)
        ]
    with pytest.raises(DataError, match=r"has hash other, the index was built with hash-encoder"):
        opened(tmp_path / "flat", HashEncoder("other"))


@servers
def test_fusion_is_that_of_the_two_rankings(corpus, town_passages, server, tmp_path):
    path, encoder = corpus(town_passages), HashEncoder()
    settings = made(server.alias, mode="hybrid", fusion_depth=6, fusion_k=10.0, fusion_weights=(1.0, 0.5))
    both = loaded(path, tmp_path / "hybrid", settings, encoder)
    terms = loaded(path, tmp_path / "bm25", replace(settings, mode="bm25"))
    near = loaded(path, tmp_path / "knn", replace(settings, mode="knn"), encoder)
    queries = ["city of Switzerland", "river", "", "nowhere"]
    for query, hits in zip(queries, both.search(queries, 4), strict=True):
        matching = [hit for hit in terms.search([query], 6)[0] if hit.score > 0]
        assert hits == fuse([matching, near.search([query], 6)[0]], 4, 10.0, (1.0, 0.5))
    assert [len(hits) for hits in both.search(queries, 50)] == [10] * 4


# Indexes and aliases


@servers
def test_the_alias_moves_from_the_older_index_at_once(corpus, town_passages, server, tmp_path):
    old = load(corpus(town_passages), tmp_path / "old", made(server.alias))["details"]["index"]
    assert server.holders() == [old]
    new = load(corpus(town_passages[:3]), tmp_path / "new", made(server.alias))["details"]["index"]
    assert server.holders() == [new]
    assert server.indexes() == sorted([old, new])
    # A search uses the index it was opened for, wherever the alias points.
    assert names(opened(tmp_path / "old").search(["mountains"], 1)[0]) == ["p7"]
    assert names(opened(tmp_path / "new").search(["mountains"], 1)[0]) == ["p0"]

    third = load(corpus(town_passages[:2]), tmp_path / "third", made(server.alias, old_index="remove"))
    assert server.holders() == [third["details"]["index"]]
    assert server.indexes() == sorted([old, third["details"]["index"]])
    with pytest.raises(DataError, match=rf"has no index {new}: .* dvc repro --force --single-item index"):
        opened(tmp_path / "new")


@servers
def test_an_index_of_somebody_else_is_never_removed(corpus, town_passages, server, tmp_path):
    foreign = f"{server.alias}-notes"
    server.call(foreign, "PUT", {"aliases": {server.alias: {}}})
    load(corpus(town_passages), tmp_path / "index", made(server.alias, old_index="remove"))
    assert foreign in server.indexes()
    assert foreign not in server.holders()


@servers
def test_an_index_that_has_the_aliass_name_is_noticed_before_the_load(corpus, town_passages, server, tmp_path):
    server.call(server.alias, "PUT", {})
    with pytest.raises(DataError, match=rf"alias='{server.alias}': .* has an index of this name"):
        load(corpus(town_passages), tmp_path / "index", made(server.alias))
    assert server.indexes() == []
    server.call(server.alias, "DELETE")


@servers
def test_a_second_build_loads_nothing_and_gives_the_same_bytes(corpus, town_passages, server, tmp_path):
    path, encoder = corpus(town_passages), HashEncoder()
    settings = made(server.alias, mode="knn")
    load(path, tmp_path / "one", settings, encoder)
    again = HashEncoder()
    load(path, tmp_path / "two", settings, again)
    assert again.texts == []
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert list(one) == ["manifest.json"]
    assert b"127.0.0.1" not in one["manifest.json"]


@servers
def test_the_mapping_refuses_foreign_fields_and_a_finished_index_any_change(corpus, town_passages, server, tmp_path):
    path = corpus(town_passages)
    settings = made(server.alias)
    body = index_body(settings, "0" * 64, None)
    draft = index_name(server.alias, body)
    server.call(draft, "PUT", body)
    refused = server.call(f"{draft}/_doc/1", "PUT", {"id": "p1", "row": 1, "title": "", "text": "", "stars": 5})
    assert refused["error"]["type"] == "strict_dynamic_mapping_exception"
    index = load(path, tmp_path / "index", settings)["details"]["index"]
    refused = server.call(f"{index}/_doc/99", "PUT", {"id": "p99", "row": 99, "title": "", "text": ""})
    assert refused["error"]["type"] == "cluster_block_exception"
    assert server.rows(index) == [(f"p{i}", i) for i in range(10)]


@servers
def test_a_wrong_count_leaves_the_alias(corpus, town_passages, server, tmp_path):
    path = corpus(town_passages[:4])
    older = load(path, tmp_path / "older", made(server.alias))["details"]["index"]
    path, settings = corpus(town_passages), made(server.alias)
    body = index_body(settings, manifests.corpus_sha256(path), None)
    index = index_name(server.alias, body)
    server.call(index, "PUT", body)
    server.call(f"{index}/_doc/foreign?refresh=true", "PUT", {"id": "x", "row": 3, "title": "", "text": "x"})
    message = rf"index {index} at .* has 11 passages, the corpus 10: something else writes to it.*stays as it was"
    with pytest.raises(DataError, match=message):
        load(path, tmp_path / "index", settings)
    assert server.holders() == [older]
    assert not (tmp_path / "index").exists()


@servers
def test_an_index_of_another_corpus_is_refused(corpus, town_passages, server, tmp_path):
    path, settings = corpus(town_passages), made(server.alias)
    index = load(path, tmp_path / "index", settings)["details"]["index"]
    with pytest.raises(DataError, match="built from another corpus"):
        retrieval.open_retriever(tmp_path / "index", corpus(town_passages[:5]))
    server.call(index, "DELETE")
    other = index_body(settings, "f" * 64, None)
    server.call(index, "PUT", other)
    with pytest.raises(DataError, match=rf"index {index} at .* holds another corpus \(f{{12}}\)"):
        opened(tmp_path / "index")
    with pytest.raises(DataError, match=rf"index {index} at .* was made for something else"):
        load(corpus(town_passages), tmp_path / "index", settings)
    server.call(index, "DELETE")
    server.call(index, "PUT", index_body(settings, manifests.corpus_sha256(corpus(town_passages)), None))
    with pytest.raises(DataError, match=rf"index {index} at .* has 0 passages, expected 10"):
        opened(tmp_path / "index")


@servers
def test_what_the_server_refuses_is_named(corpus, town_passages, server, tmp_path):
    path = corpus(town_passages)
    with pytest.raises(DataError, match=r"refused the index: .*analyzer \[klingon\]"):
        load(path, tmp_path / "index", made(server.alias, analyzer="klingon"))
    nodes = server.call("_cluster/health")["number_of_data_nodes"]
    message = rf"replicas={nodes} needs {nodes + 1} data nodes, .* has {nodes}\. Start more, or set replicas to"
    with pytest.raises(DataError, match=message):
        load(path, tmp_path / "index", made(server.alias, replicas=nodes))
    long = store.digest("long") * 3_000
    store.write_jsonl(path, [{"id": "a", "title": "", "text": "fine"}, {"id": long, "title": "", "text": "x"}])
    with pytest.raises(
        DataError, match=r"refused the passage of row 1 \(counted from 0\): HTTP 400: .*field \[id\].*immense term"
    ):
        load(path, tmp_path / "index", made(server.alias))
    assert server.holders() == []


@servers
def test_a_vanished_index_fails_a_search_at_once(corpus, town_passages, server, tmp_path):
    retriever = loaded(corpus(town_passages), tmp_path / "index", made(server.alias))
    server.clean()
    with pytest.raises(RetrievalError, match=r"is not what it was: HTTP 404: .* dvc repro --force --single-item index"):
        retriever.search(["city"], 1)


@servers
def test_large_passages_go_in_several_requests(corpus, server, tmp_path):
    passages = [(f"Book {i}", f"chapter{i} " + "lorem ipsum " * 90_000) for i in range(12)]
    retriever = loaded(corpus(passages), tmp_path / "index", made(server.alias))
    assert names(retriever.search([f"chapter{i}" for i in (0, 11)], 1)[0]) == ["p0"]
    assert retriever.search(["chapter7"], 1)[0][0].text == passages[7][1]


# Outages


@servers
def test_a_full_queue_slows_the_load_and_loses_nothing(corpus, own_server, tmp_path):
    """The node takes one write at a time and lets two wait; sixteen are under way."""
    passages = numbered(600)
    manifest = load(corpus(passages), tmp_path / "index", made(own_server.alias, chunk_size=10, max_in_flight=16))
    pools = own_server.call("_nodes/stats/thread_pool")["nodes"].values()
    assert sum(one["thread_pool"]["write"]["rejected"] for one in pools) > 0
    assert own_server.rows(manifest["details"]["index"]) == [(f"p{i}", i) for i in range(600)]


def _dying(after: int) -> Callable[..., Iterator[Any]]:
    def progress(iterable: Iterable[Any], total: int | None, desc: str) -> Iterator[Any]:
        for number, item in enumerate(iterable):
            if number == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    return progress


@servers
def test_a_killed_load_goes_on_where_it_stopped(corpus, server, tmp_path):
    path, settings = corpus(numbered(300)), made(server.alias, mode="knn", chunk_size=10, max_in_flight=2)
    for after in (9, 20):
        process = multiprocessing.get_context("fork").Process(
            target=load, args=(path, tmp_path / "index", settings, HashEncoder(), _dying(after))
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / "index").exists()
        assert server.holders() == []
    encoder = HashEncoder()
    manifest = load(path, tmp_path / "index", settings, encoder)
    # Chunks 0 to 19 were handed out before the second kill; of these at most two were under way.
    assert 100 <= len(encoder.texts) <= 120
    assert server.rows(manifest["details"]["index"]) == [(f"p{i}", i) for i in range(300)]
    assert server.holders() == [manifest["details"]["index"]]


@servers
@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_load(corpus, node: Node, own_server: Server, tmp_path):
    """kill -9 with requests under way; the load waits, goes on when the server is back, and needs no second start."""
    killed = []

    def progress(iterable: Iterable[Any], total: int | None, desc: str) -> Iterator[Any]:
        for number, item in enumerate(iterable):
            if number == 15:
                node.kill()
                node.start()
                killed.append(number)
            yield item

    settings = made(own_server.alias, chunk_size=50, max_in_flight=3)
    manifest = load(corpus(numbered(2_000)), tmp_path / "index", settings, progress=progress)
    assert killed == [15]
    assert own_server.rows(manifest["details"]["index"]) == [(f"p{i}", i) for i in range(2_000)]
    assert own_server.holders() == [manifest["details"]["index"]]
    assert names(opened(tmp_path / "index").search(["word1999"], 1)[0]) == ["p1999"]


@servers
@pytest.mark.slow
def test_a_server_that_stays_away_stops_the_load_and_the_next_one_goes_on(
    corpus, node: Node, own_server: Server, tmp_path
):
    def progress(iterable: Iterable[Any], total: int | None, desc: str) -> Iterator[Any]:
        for number, item in enumerate(iterable):
            if number == 10:
                node.kill()
            yield item

    path = corpus(numbered(1_000))
    settings = made(own_server.alias, mode="knn", chunk_size=50, max_in_flight=2, retry_s=1.0)
    with pytest.raises(
        DataError, match=r"loading rows \d+ to \d+ failed \d+ times, for 1 s, .* goes on where it stopped"
    ):
        load(path, tmp_path / "index", settings, HashEncoder(), progress)
    assert not (tmp_path / "index").exists()
    node.ensure()
    encoder = HashEncoder()
    manifest = load(path, tmp_path / "index", settings, encoder)
    assert 500 <= len(encoder.texts) <= 600
    assert own_server.rows(manifest["details"]["index"]) == [(f"p{i}", i) for i in range(1_000)]


@servers
@pytest.mark.slow
def test_a_server_killed_in_a_rollout(corpus, node: Node, own_server: Server, tmp_path, tokenizer):
    """The server dies after turn 1: patience outlives it, too little fails, the next play goes on; nothing is empty."""
    from tests.tiny import PLACES, Script, make_player, question

    load(corpus([(place, f"{place} is a town .") for place in PLACES]), tmp_path / "index", made(own_server.alias))
    search, answer = "<think> a </think> <search> Avenor </search>", "<think> b </think> <answer> Bristow </answer>"
    other = search.replace("Avenor", "Bristow")

    class Killer(Script):
        """Kills the server and starts it again when the second search is written."""

        is_armed = True

        def generate(self, rows: Any, max_new_tokens: Any) -> Any:
            if self.is_armed and self.lines[0][0] == other:
                node.kill()
                node.start()
            return super().generate(rows, max_new_tokens)

    def play(patience: float, is_armed: bool = True) -> list[Any]:
        manifest = manifests.read(tmp_path / "index")
        manifest = replace(manifest, settings={**manifest.settings, "retry_s": patience})
        retriever = elasticsearch.open_index(tmp_path / "index", manifest)
        script = Killer(tokenizer, [[search, other, answer], [search, other, answer]])
        script.is_armed = is_armed
        player = make_player(script, tokenizer, retriever, max_call_tokens=60, max_total_tokens=600, search_retries=0)
        return player.play([question(0), question(1)], 1, Sampling(1.0, 1.0, (), 0))

    for trajectory in play(60.0):
        assert trajectory.status == "answered"
        assert [turn.hits[0].title for turn in trajectory.turns[:2]] == ["Avenor", "Bristow"]
    for trajectory in play(0.5):
        assert trajectory.status == "failed"
        assert "the search failed" in str(trajectory.error)
        first, second = trajectory.turns
        assert first.hits[0].title == "Avenor"
        assert not second.executed
        assert second.observation == ""
    for trajectory in play(60.0, is_armed=False):
        assert trajectory.status == "answered"
        assert [turn.hits[0].title for turn in trajectory.turns[:2]] == ["Avenor", "Bristow"]


class ThreeNodes:
    """Three nodes of which tests kill any; the last address that a client is given never answers."""

    def __init__(self, nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(URL, ",".join([*(one.url for one in nodes), f"http://127.0.0.1:{free_port()}"]))
        self.nodes, self.server = nodes, Server(nodes[0].url)
        self.settings = made(self.server.alias, shards=3, replicas=1, chunk_size=25, max_in_flight=3)

    def master(self) -> int:
        state = self.server.wait_for("nodes", "_cluster/state/master_node,nodes")
        return int(state["nodes"][state["master_node"]]["name"][1:])

    def kill(self, victim: int) -> None:
        self.nodes[victim].kill()
        self.server.url = self.nodes[(victim + 1) % 3].url

    def start_again(self, victim: int) -> None:
        self.nodes[victim].start()
        self.nodes[(victim + 1) % 3].wait("wait_for_nodes=3&wait_for_status=green")


@pytest.fixture
def cluster(three_nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreeNodes]:
    """All three run; the test's indexes are its own."""
    for one in three_nodes:
        if not one.is_running:
            one.start()
    for one in three_nodes:
        one.wait("wait_for_nodes=3&wait_for_status=green")
    cluster = ThreeNodes(three_nodes, monkeypatch)
    yield cluster
    cluster.server.clean()


@servers
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("away", [0, 1], ids=["master", "other"])
def test_a_cluster_of_three_loses_a_node_in_a_load(corpus, cluster: ThreeNodes, tmp_path, away):
    """One replica: no passage is lost or twice."""
    victim = (cluster.master() + away) % 3

    def progress(iterable: Iterable[Any], total: int | None, desc: str) -> Iterator[Any]:
        for number, item in enumerate(iterable):
            if number == 20:
                cluster.kill(victim)
            yield item

    manifest = load(corpus(numbered(1_500)), tmp_path / "index", cluster.settings, progress=progress)
    assert cluster.server.rows(manifest["details"]["index"]) == [(f"p{i}", i) for i in range(1_500)]


@servers
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_replica_that_no_node_may_take(corpus, cluster: ThreeNodes, tmp_path, monkeypatch):
    monkeypatch.setattr(elastic_load, "_START_S", 2)
    setting = "cluster.routing.allocation.enable"
    cluster.server.call("_cluster/settings", "PUT", {"persistent": {setting: "primaries"}})
    try:
        reason = rf"replicas could start; replica .*{setting}=primaries\]\. Run again when it is mended"
        with pytest.raises(DataError, match=reason):
            load(corpus(numbered(50)), tmp_path / "index", cluster.settings)
    finally:
        cluster.server.call("_cluster/settings", "PUT", {"persistent": {setting: None}})


@servers
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_of_three_loses_one_node_after_the_other_in_searches(corpus, cluster: ThreeNodes, tmp_path):
    """One replica, first a node that is not the elected master, then the master: no query fails."""
    index = load(corpus(numbered(1_500)), tmp_path / "index", cluster.settings)["details"]["index"]
    retriever = opened(tmp_path / "index")
    asked, wrong, stop = [], [], threading.Event()

    def keep_searching(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            rows = [rng.randrange(1_500) for _ in range(8)]
            try:
                found = retriever.search([f"word{row}" for row in rows], 2)
                wrong.extend(row for row, hits in zip(rows, found, strict=True) if names(hits)[0] != f"p{row}")
            except RetrievalError as error:
                wrong.append(str(error))
            asked.append(time.monotonic())
            time.sleep(0.02)  # Without a pause these threads keep every processor busy.

    threads = [threading.Thread(target=keep_searching, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for away in (1, 0):
        victim = (cluster.master() + away) % 3
        before = len(asked)
        while len(asked) < before + 20:
            time.sleep(0.01)
        cluster.kill(victim)
        killed = time.monotonic()
        while sum(moment > killed + 1 for moment in asked) < 40:
            time.sleep(0.05)
        if away:
            cluster.start_again(victim)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cluster.server.rows(index) == [(f"p{i}", i) for i in range(1_500)]


# Access


def test_addresses_and_credentials_come_from_the_environment(tmp_path):
    assert access({}) == Access(("http://127.0.0.1:9200",))
    assert access({URL: " http://a:1/es/ ,https://[::1]:2,http://a:1/es"}).hosts == ("http://a:1/es", "https://[::1]:2")
    named = access({URL: "https://elastic:c%2Cd%40e@a:1,https://elastic:c%2Cd%40e@b:1"})
    assert (named.hosts, named.user) == (("https://a:1", "https://b:1"), ("elastic", "c,d@e"))
    pem = tmp_path / "ca.pem"
    pem.touch()
    assert access({KEY: "abc", CA_CERTS: str(pem)}).ca_certs == str(pem)
    assert "abc" not in repr(access({KEY: "abc"}))
    assert "c,d" not in repr(named)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({URL: "localhost:9200"}, "address 1 'localhost:9200': expected scheme://host:port"),
        ({URL: "http://a:1,ftp://b:2"}, "address 2 'ftp://b:2'"),
        ({URL: "http://a"}, "address 1 'http://a'"),
        ({URL: "http://me:hidden@a"}, r"address 1 \(not shown: it holds credentials\)"),
        ({URL: "http://me:hid,den@a:1"}, r"address 1 \(not shown"),
        ({URL: "http://me:12/hidden@a:1"}, r"address 1 \(not shown"),
        ({URL: "http://me:12#hidden@a:1"}, r"address 1 \(not shown"),
        ({URL: ","}, "found 0 addresses"),
        ({URL: "http://me:hidden@a:1,http://you:hidden@b:1"}, "2 addresses with 2 different users"),
        ({URL: "http://me:hidden@a:1", KEY: "hidden"}, f"1 different users and an {KEY}"),
        ({CA_CERTS: "nowhere.pem"}, "nowhere.pem: no such file"),
    ],
)
def test_a_wrong_environment_is_named_without_its_secrets(environment, message):
    with pytest.raises(DataError, match=message) as caught:
        access(environment)
    assert "hid" not in str(caught.value)


def test_a_host_that_does_not_answer(corpus, town_passages, monkeypatch, tmp_path, capfd):
    port = free_port()
    monkeypatch.setenv(URL, f"http://elastic:hidden@127.0.0.1:{port}")
    settings = made("nobody", retry_s=0.3)
    with pytest.raises(
        DataError, match=rf"the first contact failed \d times, for 0.3 s, at http://127.0.0.1:{port}\. .*refused"
    ):
        load(corpus(town_passages), tmp_path / "index", settings)
    cluster = Cluster(access(), 1.0, 0.3)
    retriever = elasticsearch.ElasticsearchRetriever(cluster, "nobody-0", settings, 10)
    with pytest.raises(RetrievalError, match=r"the search failed \d times") as caught:
        retriever.search(["city"], 1)
    assert "hidden" not in str(caught.value)
    assert "hidden" not in "".join(capfd.readouterr())


class _Stub(http.server.BaseHTTPRequestHandler):
    """An HTTP server that is or pretends to be something else; `answers` maps a path to status and body."""

    answers: dict[str, tuple[int, Any]]
    first: list[tuple[int, Any]]
    seen: list[str]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status, body = self.answers.get(self.path.partition("?")[0], (404, {}))
        if self.first:
            status, body = self.first.pop(0)
        self.seen.append(str(self.headers.get("authorization")))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if "hello" not in body:
            self.send_header("x-elastic-product", "Elasticsearch")
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *words: Any) -> None:
        pass


BANNER = {"version": {"number": "8.19.5"}, "tagline": "You Know, for Search"}
DENIED = {"error": {"type": "security_exception", "reason": "unable to authenticate with provided credentials"}}


def _stub(
    answers: dict[str, tuple[int, Any]], tls: ssl.SSLContext | None = None, first: Iterable[tuple[int, Any]] = ()
) -> tuple[str, list[str]]:
    """Address of a stub that lives as long as the process, and the credentials it was shown."""
    handler = type("Handler", (_Stub,), {"answers": answers, "seen": [], "first": list(first)})
    stub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        stub.socket = tls.wrap_socket(stub.socket, server_side=True)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    return f"http{'s' if tls else ''}://127.0.0.1:{stub.server_port}", handler.seen  # type: ignore[attr-defined]


def test_a_wrong_key_is_refused_at_once_and_not_shown(monkeypatch, capfd):
    url, seen = _stub({"/": (401, DENIED)})
    monkeypatch.setenv(URL, url)
    monkeypatch.setenv(KEY, "aGlkZGVu")
    with pytest.raises(RetrievalError, match=rf"HTTP 401: security_exception: unable .*Check {KEY}") as caught:
        Cluster(access(), 5.0, 30.0).check_versions()
    assert seen == ["ApiKey aGlkZGVu"]
    assert "aGlkZGVu" not in str(caught.value) + "".join(capfd.readouterr())


def test_a_busy_server_is_asked_again_and_a_dead_host_passed_over(monkeypatch):
    monkeypatch.setattr(elastic_server, "_FIRST_PAUSE_S", 0.01)
    busy = {"error": {"type": "busy"}}
    url, seen = _stub({"/": (200, BANNER)}, first=[(status, busy) for status in (503, 429, 500, 408)])
    monkeypatch.setenv(URL, url)
    Cluster(access(), 5.0, 30.0).check_versions()
    assert len(seen) == 5
    monkeypatch.setenv(URL, f"http://127.0.0.1:{free_port()},{url}")
    for _ in range(4):
        Cluster(access(), 5.0, 0.0).check_versions()  # No patience at all, and yet every host is tried once.


def test_an_incomplete_answer_is_never_a_result(monkeypatch):
    """A shard that failed, a search out of time, a lost answer: asked again until whole, else an error."""
    source = {"id": "p3", "row": 3, "title": "Bern", "text": "A town."}
    whole = {"status": 200, "timed_out": False, "_shards": {"total": 2, "failed": 0}}
    whole |= {"hits": {"hits": [{"_score": 1.5, "_source": source}]}}
    partial: list[Any] = [
        {"responses": []},
        {"responses": [whole | {"timed_out": True}]},
        {"responses": [whole | {"_shards": {"total": 2, "failed": 1}}]},
        {"responses": [{"status": 503, "error": {"type": "no_shard_available_action_exception"}}]},
        {},
    ]
    monkeypatch.setattr(elastic_server, "_FIRST_PAUSE_S", 0.01)
    paths = {"/some/_msearch": (200, {"responses": [whole]})}
    monkeypatch.setenv(URL, _stub(paths, first=[(200, answer) for answer in partial])[0])
    retriever = elasticsearch.ElasticsearchRetriever(Cluster(access(), 5.0, 30.0), "some", made("some"), 9)
    assert retriever.search(["Bern"], 1) == [[Hit("p3", 1.5, "Bern", "A town.")]]
    for answer in partial:
        monkeypatch.setenv(URL, _stub({"/some/_msearch": (200, answer)})[0])
        impatient = elasticsearch.ElasticsearchRetriever(Cluster(access(), 5.0, 0.0), "some", made("some"), 9)
        with pytest.raises(RetrievalError, match="the search failed 1 times"):
            impatient.search(["Bern"], 1)


def test_a_server_that_is_no_elasticsearch(monkeypatch):
    monkeypatch.setenv(URL, _stub({"/": (200, {"hello": "world"})})[0])
    with pytest.raises(RetrievalError, match="What answers there is no Elasticsearch"):
        Cluster(access(), 5.0, 30.0).check_versions()


def test_an_older_server_is_refused_with_the_client_to_install(monkeypatch):
    old = {"version": {"number": "7.17.9"}, "tagline": "You Know, for Search"}
    monkeypatch.setenv(URL, _stub({"/": (200, old)})[0])
    message = r"version 7\.17\.9, the installed Python client 8\..*: pip install 'elasticsearch>=7,<8'"
    with pytest.raises(DataError, match=message):
        Cluster(access(), 5.0, 30.0).check_versions()


@pytest.mark.slow
def test_tls_needs_the_authority(monkeypatch, certificate):
    """A certificate we signed ourselves: refused at once without its authority, accepted with it."""
    key, pem = certificate
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem, key)
    monkeypatch.setenv(URL, _stub({"/": (200, BANNER)}, tls)[0])
    with pytest.raises(RetrievalError, match=rf"(?s)certificate.*authority in {CA_CERTS}"):
        Cluster(access(), 5.0, 30.0).check_versions()
    monkeypatch.setenv(CA_CERTS, str(pem))
    Cluster(access(), 5.0, 30.0).check_versions()


@servers
def test_a_client_of_another_major_version(corpus, town_passages, server, monkeypatch, tmp_path):
    load(corpus(town_passages), tmp_path / "index", made(server.alias))
    with monkeypatch.context() as patch:
        patch.setattr(elastic_server, "client_version", lambda: "9.5.0")
        message = r"is version 8\.\d+\.\d+, the installed Python client 9\.5\.0.*pip install 'elasticsearch>=8\.19,<9'"
        with pytest.raises(DataError, match=message):
            opened(tmp_path / "index")
    # What such a client would really send.
    import elasticsearch._sync.client._base as base

    ask = Cluster(access(), 5.0, 30.0).ask
    monkeypatch.setattr(base, "_COMPAT_MIMETYPE_SUB", base._COMPAT_MIMETYPE_SUB.replace("=8", "=9"))
    with pytest.raises(RetrievalError, match=r"does not fit this server.*pip install 'elasticsearch>=8\.19,<9'"):
        ask("the search", lambda client: client.cluster.health())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alias": "Bread"}, "alias='Bread': expected"),
        ({"alias": "-x"}, "alias='-x'"),
        ({"b": 1.5}, r"b=1.5: expected 0 or more and 1 or less"),
        ({"chunk_size": 0}, "chunk_size=0: expected a number above 0"),
        ({"num_candidates": 20_000}, "num_candidates=20000: expected 1 or more and 10000 or less"),
        ({"retry_s": -1}, "retry_s=-1: expected 0 or more"),
    ],
)
def test_settings_out_of_bounds(changes, message):
    with pytest.raises(ValueError, match=f"here: {message}"):
        conf.fill(Settings, {"backend": "elasticsearch", **changes}, "here")


def test_the_settings_files_say_what_the_defaults_are():
    root = Path(__file__).parents[2]
    assert retrieval.load_settings("elasticsearch", root) == Settings("elasticsearch")
    hybrid = Settings("elasticsearch", mode="hybrid", alias="breadcrumb-hybrid")
    assert retrieval.load_settings("elasticsearch_hybrid", root) == hybrid


# The pipeline


@servers
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_stages_search_the_server(server, tmp_path):
    """Index and recall; the index is lost behind DVC's back; loaded again it gives the same bytes."""
    clone = Clone.make(tmp_path / "clone")
    clone.set("retriever", "elasticsearch")
    clone.change("conf/retriever/elasticsearch.yaml", "alias: breadcrumb", f"alias: {server.alias}")
    clone.must("data", "validate", "index", "recall")
    before = clone.files("artifacts")
    recall = json.loads(before["artifacts/recall.json"])["datasets"]
    assert all(row["recall@10"] > 0.5 for row in recall.values())
    server.clean()
    done = clone.stage("recall")
    assert done.returncode == 1
    assert "has no index" in done.stderr
    assert "dvc repro --force --single-item index" in done.stderr
    clone.must("index", "recall")
    assert clone.files("artifacts") == before


# Real data


@servers
@pytest.mark.slow
@needs_shared(REAL)
def test_recall_on_real_passages_is_that_of_our_bm25(server, tmp_path):
    """400 questions with their passages and 6,000 others; two stemmers and rounded lengths explain the rest."""
    rng = random.Random(0)
    questions: list[Question] = []
    for name in ("musique", "hotpotqa", "2wikimultihopqa", "nq"):
        questions += rng.sample(list(_labelled(name)), 100)
    gold = {passage for question in questions for passage in question.gold_passage_ids}
    rows = [row for _, row in store.read_jsonl(REAL / "corpus.jsonl.gz")]
    others = set(rng.sample(range(len(rows)), 6_000))
    store.write_jsonl(tmp_path / "corpus.jsonl", (r for i, r in enumerate(rows) if i in others or r["id"] in gold))
    tables = []
    for settings in (made(server.alias), bm25.Settings("bm25", stemmer="snowball")):
        retrieval.build(tmp_path / "corpus.jsonl", tmp_path / settings.backend, settings)
        retriever = retrieval.open_retriever(tmp_path / settings.backend, tmp_path / "corpus.jsonl")
        tables.append(recall_table(questions, retriever))
    for name in tables[1]:
        assert 100 * tables[0][name]["recall@5"] == pytest.approx(100 * tables[1][name]["recall@5"], abs=1.5), name


def _labelled(dataset: str) -> Iterator[Question]:
    for number, row in store.read_jsonl(REAL / dataset / "questions.jsonl.gz"):
        try:
            question = to_question(row, f"{dataset}: row {number}")
        except UnscorableError:
            continue
        if question.gold_complete:
            yield question
