"""An Elasticsearch index that exists, on a real server, is taken over unchanged; one of another corpus is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, retrieval, store
from tasks.retrieval import RetrievalError
from tasks.retrieval.elasticsearch_index import Settings
from tasks.store import DataError
from tests.retrieval import elastic
from tests.retrieval.elastic import Server
from tests.retrieval.test_elasticsearch import load, names, numbered, opened
from tests.retrieval.test_elasticsearch import made as made_ours
from tests.stages.clone import Clone

node, own_server, server = elastic.node, elastic.own_server, elastic.server

servers = pytest.mark.servers

CONTENTS = '"{title}"\n{text}'
FOREIGN = {
    "docid": {"type": "keyword"},
    "number": {"type": "long"},
    "meta": {"properties": {"title": {"type": "text", "index": False}}},
}
Passages = list[tuple[str, str]]
Taken = Callable[..., Any]


def client_of(server: Server) -> Any:
    from elasticsearch import Elasticsearch

    return Elasticsearch(server.url, request_timeout=60)


def foreign(
    server: Server, passages: Passages, ids: Iterable[str] | None = None, name: str = "wiki", analyzer: str = "standard"
) -> str:
    """An index as other people make them: one document a passage, with fields of other names."""
    index, client = f"{server.alias}-{name}", client_of(server)
    fields = {**FOREIGN, "contents": {"type": "text", "analyzer": analyzer}}
    client.indices.create(index=index, settings={"number_of_shards": 2}, mappings={"properties": fields})
    lines: list[Any] = []
    for number, ((title, text), passage_id) in enumerate(
        zip(passages, ids or (f"p{i}" for i in range(len(passages))), strict=True)
    ):
        document = {"docid": passage_id, "number": number, "meta": {"title": title}}
        document["contents"] = CONTENTS.format(title=title, text=text)
        lines += [{"create": {"_id": passage_id}}, document]
    assert not client.bulk(index=index, operations=lines, refresh=True)["errors"]
    return index


def made(index: str, **changes: Any) -> Settings:
    """Settings for `foreign`, with short waits."""
    given = {"id_field": "docid", "title_field": "meta.title", "text_field": "contents", "text_format": CONTENTS}
    waits = {"retry_s": 20.0, "request_timeout_s": 10.0}
    return Settings("elasticsearch_index", index, **{**given, "search_fields": ("contents",), **waits, **changes})


def take_over(corpus: Path, settings: Settings) -> Any:
    out = corpus.parent / "taken"
    retrieval.build(corpus, out, settings)
    return retrieval.open_retriever(out, corpus)


def everything(server: Server) -> Any:
    """What the server says of all its indexes, but for times and uses."""
    stats = server.call("_stats/docs,store,segments,indexing?level=shards")["indices"]
    of_copies = [
        (name, number, copy["seq_no"]["max_seq_no"], copy["docs"], copy["commit"]["generation"])
        for name, index in sorted(stats.items())
        for number, copies in sorted(index["shards"].items())
        for copy in copies
    ]
    return server.call("_all"), server.call("_alias"), of_copies


# What comes back


@servers
def test_its_hits_are_those_of_the_server_and_nothing_in_it_changes(corpus, town_passages, server):
    index = foreign(server, town_passages)
    path = corpus(town_passages)
    server.call(f"{index}/_settings", "PUT", {"index.blocks.write": True, "index.blocks.metadata": False})
    before = everything(server)
    retriever = take_over(path, made(index, search_batch=2))

    queries = ["city of Switzerland", "Zürich BERN", "東京", "river", "mountains"]
    found = retriever.search(queries, 4)
    for query, hits in zip(queries, found, strict=True):
        body = {"query": {"match": {"contents": query}}, "size": 10}
        answer = server.call(f"{index}/_search?search_type=dfs_query_then_fetch", "POST", body)["hits"]["hits"]
        ranked = sorted(answer, key=lambda one: (-one["_score"], int(one["_id"][1:])))[:4]
        assert [(hit.passage_id, hit.score) for hit in hits][: len(ranked)] == [(o["_id"], o["_score"]) for o in ranked]
        assert [hit.score for hit in hits[len(ranked) :]] == [0.0] * (4 - len(ranked))
        for hit in hits:
            assert (hit.title, hit.text) == town_passages[int(hit.passage_id[1:])]
    assert everything(server) == before


@servers
def test_order_counts_and_bounds(corpus, server):
    """Far more equal scores than the spare hits that are asked for: still in corpus order."""
    passages = [("", "same words here") for _ in range(300)] + [("", "same words here best")]
    retriever = take_over(corpus(passages), made(foreign(server, passages)))
    assert names(retriever.search(["words best"], 4)[0]) == ["p300", "p0", "p1", "p2"]
    assert names(retriever.search(["same"], 60)[0]) == [f"p{i}" for i in range(60)]
    for hits in retriever.search(["", "?!", "unheardof"], 3):
        assert [(hit.passage_id, hit.score) for hit in hits] == [("p0", 0.0), ("p1", 0.0), ("p2", 0.0)]
    assert len(set(names(retriever.search(["best"], 9_999)[0]))) == 301
    assert retriever.search([], 3) == []
    with pytest.raises(ValueError, match="top_k=0: expected at least 1"):
        retriever.search(["city"], 0)
    long = ["word " * 5_000, "字" * 3_000, "half \ud800 a character"]
    assert [len(hits) for hits in retriever.search(long, 3)] == [3, 3, 3]


@servers
@pytest.mark.parametrize("id_field", ["_id", "number"])
def test_ids_of_other_kinds(corpus, server, id_field):
    passages = numbered(40)
    path = corpus(passages)
    store.write_jsonl(path, ({"id": str(i), "title": t, "text": x} for i, (t, x) in enumerate(passages)))
    index = foreign(server, passages, (str(i) for i in range(40)))
    retriever = take_over(path, made(index, id_field=id_field))
    assert [names(hits)[0] for hits in retriever.search([f"word{i}" for i in range(40)], 2)] == [*map(str, range(40))]


@servers
def test_an_index_of_our_own_taken_over_gives_the_same_hits(corpus, town_passages, server, tmp_path):
    path = corpus(town_passages)
    index = load(path, tmp_path / "ours", made_ours(server.alias, shards=2))["details"]["index"]
    given = Settings("elasticsearch_index", server.alias, search_fields=("content",), retry_s=20.0)
    taken = take_over(path, given)
    queries = ["city of Switzerland", "", "mountains", "Zürich", "nowhere"]
    assert taken.search(queries, 5) == opened(tmp_path / "ours").search(queries, 5)
    assert server.holders() == [index], "the alias stays where it was"


# What is refused


@servers
def test_what_does_not_belong_to_the_corpus_is_refused(corpus, server):
    passages = numbered(40)
    index, path = foreign(server, passages), corpus(passages)
    foreign(server, passages[:-1], name="short")
    foreign(server, [(title, "another text") for title, _ in passages], name="text")
    foreign(server, passages, (f"q{i}" for i in range(40)), name="ids")
    server.call(
        "_aliases", "POST", {"actions": [{"add": {"index": f"{server.alias}-*", "alias": f"{server.alias}all"}}]}
    )
    cases: list[tuple[Settings, str]] = [
        (made(f"{server.alias}-none"), rf"no index '{server.alias}-none' at .*, expected one\. Set `index` in"),
        (made(f"{server.alias}all"), rf"4 indexes behind '{server.alias}all' \({server.alias}-ids, "),
        (made(f"{server.alias}-short"), r"has 39 documents, and .*corpus\.jsonl has 40 passages"),
        (made(f"{server.alias}-text"), r"40 of 40 compared passages are not those .* 'p0': contents is '\"Title 0\""),
        (made(f"{server.alias}-ids"), r"40 of 40 compared .* The first is 'p0': no document has that docid"),
        (made(index, title_field="contents"), r"'p0': contents is .*, expected 'Title 0'"),
        (made(index, title_field="title"), r"field 'title' is not in its mapping, expected one that is there"),
        (made(index, id_field="contents"), r"field 'contents' is of type text, expected an indexed one of keyword, "),
        (made(index, search_fields=("docid^2",)), r"field 'docid' is of type keyword and cannot be searched by words"),
        (made(index, search_fields=("meta.title",)), r"field 'meta.title' is of type text and cannot be searched"),
    ]  # fmt: skip
    for settings, message in cases:
        with pytest.raises(DataError, match=message) as caught:
            take_over(path, settings)
        assert "\n" not in str(caught.value)
        assert not (path.parent / "taken").exists()


@servers
def test_an_index_that_has_changed_since_is_refused(corpus, server):
    passages = numbered(20)
    index, path = foreign(server, passages), corpus(passages)
    retriever, out = take_over(path, made(index)), path.parent / "taken"
    retrieval.open_retriever(out)
    document = server.call(f"{index}/_doc/p3")["_source"]

    server.call(f"{index}/_doc/p3?refresh", "PUT", document)  # The same again: as many documents, and one more write.
    with pytest.raises(
        DataError, match=r"has changed since it was taken over \(operations 20 -> 21.*--single-item index"
    ):
        retrieval.open_retriever(out)
    server.call(f"{index}/_doc/q3?refresh", "PUT", {**document, "docid": "q3"})
    with pytest.raises(DataError, match=r"documents 20 -> 21"):
        retrieval.open_retriever(out)
    with pytest.raises(RetrievalError, match=r"is not what it was: it has a document 'q3', and the corpus has no such"):
        retriever.search(["word3"], 2)

    server.call(index, "DELETE")
    with pytest.raises(DataError, match=rf"no index '{index}' at"):
        retrieval.open_retriever(out)
    with pytest.raises(RetrievalError, match="is not what it was: HTTP 404: index_not_found"):
        retriever.search(["word3"], 2)
    foreign(server, passages)
    with pytest.raises(DataError, match=r"has changed since it was taken over \(uuid "):
        retrieval.open_retriever(out)


@servers
def test_without_a_comparison_a_foreign_document_fails_the_search(corpus, server):
    """`num_compared: 0` takes any index with the right number of documents, and no search invents a passage."""
    passages = numbered(20)
    index = foreign(server, passages, (f"q{i}" for i in range(20)))
    retriever = take_over(corpus(passages), made(index, num_compared=0))
    with pytest.raises(RetrievalError, match="the corpus has no such passage"):
        retriever.search(["word3"], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": "wiki*"}, r"index='wiki\*': expected the name of one index or alias"),
        ({"index": "a,b"}, "index='a,b'"),
        ({"index": "Wiki"}, "index='Wiki'"),
        ({"index": "_all"}, "index='_all'"),
        ({"search_fields": []}, "search_fields"),
        ({"text_format": "{title}"}, r"text_format='\{title\}': expected a text with \{text\} in it"),
        ({"match": "phrase"}, "match: found 'phrase', expected one of 'best"),
    ],
)
def test_settings_out_of_bounds(changes, message):
    with pytest.raises(ValueError, match=f"here: {message}"):
        conf.fill(Settings, {"backend": "elasticsearch_index", **changes}, "here")


def test_the_settings_file_says_what_the_defaults_are():
    root = Path(__file__).parents[2]
    assert retrieval.load_settings("elasticsearch_index", root) == Settings("elasticsearch_index")


# The pipeline


@servers
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_stages_search_an_index_that_exists(server, tmp_path):
    clone = Clone.make(tmp_path / "clone")
    clone.set("retriever", "elasticsearch_index")
    for before, after in (
        ("index: passages", f"index: {server.alias}-wiki"),
        ("id_field: id", "id_field: docid"),
        ("title_field: title", "title_field: meta.title"),
        ("text_field: text", "text_field: contents"),
        ('"{text}"', "'" + CONTENTS.replace("\n", " ") + "'"),
        ("search_fields: [title, text]", "search_fields: [contents]"),
    ):
        clone.change("conf/retriever/elasticsearch_index.yaml", before, after)
    clone.must("data", "validate")
    rows = [row for _, row in store.read_jsonl(clone.root / "artifacts/data/corpus.jsonl")]
    passages = [(row["title"], row["text"]) for row in rows]
    foreign(server, passages, (row["id"] for row in rows), analyzer="english")

    clone.must("index", "recall")
    recall = store.read_json(clone.root / "artifacts/recall.json")["datasets"]
    assert all(row["recall@10"] > 0.5 for row in recall.values())
    server.clean()
    done = clone.stage("recall")
    assert done.returncode == 1
    assert "no index" in done.stderr
