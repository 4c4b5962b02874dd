"""An Elasticsearch index that somebody else has loaded, taken over as it is: BM25 as that index computes it.

Nothing in the index is written, changed or deleted: the server is only asked. Whether it holds this corpus is checked:
it must have as many documents, and passages spread over the corpus must be found by their ids with title and text.
Our folder holds the passages and the row of each id, and the manifest has what identifies the index and its content.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tasks import conf, store
from tasks.conf import require
from tasks.data.ingest import key_of
from tasks.retrieval import Progress, RetrievalError, check_request, elastic_server
from tasks.retrieval.elastic_search import MAX_QUERY_PIECES, Searches, clean
from tasks.retrieval.elastic_server import Cluster, PassingError
from tasks.retrieval.elastic_settings import MAX_HITS
from tasks.retrieval.encoders import passage_text
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import Passages, copy_passages, read_corpus
from tasks.store import DataError, Row
from tasks.text import composed
from tasks.types import Hit, Passage

ID = "_id"
"""As `id_field`: the ids that the server itself keeps."""
_KEYS, _ROWS = "id-keys.npy", "id-rows.npy"
_SPARE = 16  # Hits asked for beyond those wanted, so that most ties can be put into the order of the corpus at once.
_ID_TYPES = ("keyword", "long", "integer", "short", "byte", "unsigned_long")
_TEXT_TYPES = ("text", "match_only_text", "search_as_you_type")
_TAKE_OVER = "Put that index back, or take this one over: dvc repro --force --single-item index"

Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: elasticsearch_index`.

    Attributes:
        index: its name, or an alias of it alone; later switches of the alias change nothing.
        id_field: has the id of a passage: of a type such as `keyword` or `long`, or `_id`, which the server keeps.
        title_field: has the title; an empty one where there is none.
        text_field: has the text.
        text_format: what stands in `text_field`, with `{text}` in it and `{title}` where the title goes.
        search_fields: that a query searches, each with a weight (`title^2`) if it is not 1.
        match: how the scores of several fields become one, as `multi_match` of Elasticsearch names it.
        num_compared: passages whose title and text are compared with the corpus; 0 compares none.
        search_batch: queries of one request.
        request_timeout_s: how long the server may take for one request.
        retry_s: how long a failing request is made again before it counts as failed.
    """

    backend: Literal["elasticsearch_index"]
    index: str = "passages"
    id_field: Name = "id"
    title_field: str = "title"
    text_field: Name = "text"
    text_format: str = "{text}"
    search_fields: Annotated[tuple[Name, ...], Field(min_length=1)] = ("title", "text")
    match: Literal["best_fields", "most_fields", "cross_fields"] = "best_fields"
    num_compared: NonNegativeInt = 64
    search_batch: PositiveInt = 64
    request_timeout_s: PositiveFloat = 30.0
    retry_s: NonNegativeFloat = 60.0

    def __post_init__(self) -> None:
        is_name = re.fullmatch(r"[^-_+\sA-Z\\/*?\"<>|,#:][^\sA-Z\\/*?\"<>|,#:]*", self.index) is not None
        require(is_name, "index", self.index, "the name of one index or alias")
        require("{text}" in self.text_format, "text_format", self.text_format, "a text with {text} in it")


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Check the index and copy the passages; see `tasks.retrieval.build`. `scratch` is not used.

    Raises:
        DataError: besides a bad corpus: no access, versions that do not fit, no such index or field, or an index of
            another corpus.
    """
    cluster = _connect(settings)
    try:
        cluster.check_versions()
        index = _name(cluster, settings.index)
        _check_fields(cluster, index, settings)
        keys = array("Q")
        for passage in progress(copy_passages(read_corpus(corpus), out), None, "copying passages"):
            keys.append(key_of(passage.id))
        _write_rows(keys, out)

        found = _identity(cluster, index)
        if found["documents"] != len(keys):
            raise DataError(
                f"elasticsearch: index {index} at {cluster.hosts} has {found['documents']:,} documents, and {corpus} "
                f"has {len(keys):,} passages. Each passage must be one document: name the index of this corpus."
            )
        _compare(cluster, index, settings, Passages(out), corpus)
    except RetrievalError as error:
        raise DataError(str(error)) from None
    finally:
        cluster.close()
    return Built(len(keys), {"index": index, "identity": found}, ("elasticsearch", "numpy"))


def open_index(index_dir: Path, manifest: Manifest, num_threads: int = 1) -> GivenIndexRetriever:
    """Open what `build` took over; `num_threads` is not used, for the server has its own.

    Raises:
        DataError: no access, versions that do not fit, or the index is gone or has changed since.
    """
    require(num_threads >= 1, "num_threads", num_threads, "at least 1")
    where = index_dir / NAME
    settings = conf.fill(Settings, manifest.settings, str(where))
    index, expected = str(manifest.details.get("index")), manifest.details.get("identity", {})
    cluster = _connect(settings)
    try:
        cluster.check_versions()
        found = _identity(cluster, _name(cluster, index))
    except RetrievalError as error:
        raise DataError(str(error)) from None

    if changes := [
        f"{name} {expected.get(name)} -> {found[name]}" for name in found if expected.get(name) != found[name]
    ]:
        raise DataError(
            f"{where}: index {index} at {cluster.hosts} has changed since it was taken over ({', '.join(changes)}). "
            f"{_TAKE_OVER}"
        )
    return GivenIndexRetriever(cluster, index, settings, index_dir)


class GivenIndexRetriever:
    """Searches one index; see `tasks.retrieval.Retriever`.

    A score is the server's. Passages that share no term with the query score 0, in corpus order. Up to 10,000 equal
    scores are put into corpus order, and more than 10,000 hits are refused. Of a query, the first 1,000 words and signs
    count, fewer with several fields.
    """

    def __init__(self, cluster: Cluster, index: str, settings: Settings, index_dir: Path) -> None:
        self.passages = Passages(index_dir)
        self._settings = settings
        self._searches = _searches(cluster, index, settings)
        # Plain arrays over the maps, because each item of a memmap object costs a microsecond.
        self._keys = np.asarray(np.load(index_dir / _KEYS, mmap_mode="r"))
        self._rows = np.asarray(np.load(index_dir / _ROWS, mmap_mode="r"))

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        wanted = min(top_k, len(self.passages))
        if wanted > MAX_HITS:
            raise ValueError(f"top_k={top_k}: Elasticsearch gives at most {MAX_HITS} hits of one search. Ask for less.")
        return [self._filled(ranking[:wanted], wanted) for ranking in self._rankings(queries, wanted)]

    def _rankings(self, queries: list[str], wanted: int) -> list[list[tuple[float, int]]]:
        """(score, row) of passages that share a term with each query, best first, equal scores in corpus order."""
        most = min(len(self.passages), MAX_HITS)
        size = min(wanted + _SPARE, most)
        rankings: list[list[tuple[float, int]]] = [[] for _ in queries]
        left = list(range(len(queries)))
        while left:
            answers = self._searches.ask([self._body(queries[number], size) for number in left])
            for number, hits in zip(left, answers, strict=True):
                found = [(float(hit["_score"]), self._row(_id_of(hit, self._settings.id_field))) for hit in hits]
                rankings[number] = sorted(found, key=lambda one: (-one[0], one[1]))

            # Where the last score is that of the last wanted hit, earlier passages of the same score may be missing.
            left = [
                i for i in left if len(rankings[i]) == size < most and rankings[i][-1][0] == rankings[i][wanted - 1][0]
            ]
            size = min(8 * size, most)
        return rankings

    def _body(self, query: str, size: int) -> Row:
        fields = list(self._settings.search_fields)
        text = clean(query, max(1, MAX_QUERY_PIECES // len(fields)))  # Each field has the words as clauses of its own.
        match = {"query": text, "fields": fields, "type": self._settings.match}
        return {"query": {"multi_match": match}, "size": size, **_hit_parts([self._settings.id_field])}

    def _row(self, passage_id: str) -> int:
        """The row of a passage.

        Raises:
            RetrievalError: the corpus has no such passage.
        """
        key = np.uint64(key_of(passage_id))
        at = int(np.searchsorted(self._keys, key))
        while at < len(self._keys) and self._keys[at] == key:
            row = int(self._rows[at])
            if self._hits([row], [0.0])[0].passage_id == passage_id:
                return row
            at += 1  # Another id with the same 64 bits.
        raise self._searches.lost(f"it has a document {passage_id!r:.80}, and the corpus has no such passage")

    def _filled(self, ranking: list[tuple[float, int]], wanted: int) -> list[Hit]:
        """Exactly `wanted` hits: what was found, then the first passages of the corpus that were not, at 0."""
        rows, scores = [row for _, row in ranking], [score for score, _ in ranking]
        found = set(rows)
        rest = [row for row in range(wanted) if row not in found][: wanted - len(rows)]
        return self._hits(rows + rest, scores + [0.0] * len(rest))

    def _hits(self, rows: list[int], scores: list[float]) -> list[Hit]:
        return self.passages.hits(np.array([rows], dtype=np.int64), np.array([scores]))[0]


def _name(cluster: Cluster, index: str) -> str:
    """The name of the index itself, where `index` is an alias.

    Raises:
        DataError: there is none, or there are several.
    """
    found = cluster.ask("the index", lambda client: client.options(ignore_status=404).indices.get(index=index))
    names = [] if found.meta.status == 404 else sorted(found.body)
    if len(names) != 1:
        several = f"{len(names)} indexes behind {index!r} ({', '.join(names)})" if names else f"no index {index!r}"
        raise DataError(
            f"elasticsearch: {several} at {cluster.hosts}, expected one. Set `index` in conf/retriever to the name "
            f"of an index of that server, or {elastic_server.URL} to the server that has it."
        )
    return str(names[0])


def _check_fields(cluster: Cluster, index: str, settings: Settings) -> None:
    """Raise the DataError for a field that is not there or cannot do what it must."""
    searched = tuple(field.partition("^")[0] for field in settings.search_fields)
    named = dict.fromkeys((settings.id_field, settings.title_field, settings.text_field, *searched))
    asked = [name for name in named if name not in ("", ID)]
    answer = cluster.ask("the index's fields", lambda client: client.field_caps(index=index, fields=asked))
    fields: dict[str, Row] = {name: next(iter(kinds.values())) for name, kinds in answer.body["fields"].items()}

    def refuse(name: str, found: str, expected: str) -> DataError:
        return DataError(
            f"elasticsearch: index {index} at {cluster.hosts}: field {name!r} {found}, expected {expected}. "
            "Name the fields of that index in conf/retriever."
        )

    for name in asked:
        kind = fields.get(name, {}).get("type")
        if kind is None:
            raise refuse(name, "is not in its mapping", "one that is there")
        if name == settings.id_field and (kind not in _ID_TYPES or not fields[name]["searchable"]):
            raise refuse(name, f"is of type {kind}", f"an indexed one of {', '.join(_ID_TYPES)} for the ids, or {ID}")
        if name in searched and (kind not in _TEXT_TYPES or not fields[name]["searchable"]):
            raise refuse(name, f"is of type {kind} and cannot be searched by words", "an indexed text field")


def _identity(cluster: Cluster, index: str) -> Row:
    """What identifies an index and its content, however many shards and replicas move.

    `operations` counts what was ever written: it grows when a document is overwritten, which `documents` does not show.
    """
    found = cluster.ask("the index", lambda client: client.indices.get(index=index)).body[index]

    def request(client: Any) -> tuple[int, int, int]:
        counted = client.count(index=index)
        stats = client.indices.stats(index=index, metric="docs", level="shards")
        if counted["_shards"]["failed"] or stats["_shards"]["failed"]:
            raise PassingError(f"of {counted['_shards']['total']} shards some did not answer")
        copies = [copy for shard in stats["indices"][index]["shards"].values() for copy in shard]
        primaries = [copy for copy in copies if copy["routing"]["primary"]]
        if len(primaries) != counted["_shards"]["total"]:
            raise PassingError(f"{len(primaries)} of {counted['_shards']['total']} primary shards are there")
        operations = sum(copy["seq_no"]["max_seq_no"] + 1 for copy in primaries)
        return int(counted["count"]), operations, sum(copy["docs"]["deleted"] for copy in primaries)

    documents, operations, deleted = cluster.ask("the index's statistics", request)
    settings = found["settings"]["index"]
    scoring = {name: settings.get(name) for name in ("analysis", "similarity", "number_of_shards")}
    return {
        "uuid": settings["uuid"],
        "documents": documents,
        "operations": operations,
        "deleted_documents": deleted,
        "settings_digest": store.digest(scoring),
        "mapping_digest": store.digest(found["mappings"]),
    }


def _compare(cluster: Cluster, index: str, settings: Settings, passages: Passages, corpus: Path) -> None:
    """Raise the DataError for an index in which passages, spread evenly over the corpus, are missing or others."""
    if not settings.num_compared:
        return
    rows = np.unique(np.linspace(0, len(passages) - 1, settings.num_compared).round().astype(np.int64))
    hits = passages.hits(rows[None], np.zeros((1, len(rows))))[0]
    fields = [name for name in (settings.id_field, settings.title_field, settings.text_field) if name]
    parts = {"size": 2, **_hit_parts(fields)}
    by_id = [_query_of(settings.id_field, hit.passage_id) for hit in hits]
    answers = _searches(cluster, index, settings).ask([{"query": query, **parts} for query in by_id])

    compared = zip(hits, answers, strict=True)
    faults = [(hit, fault) for hit, found in compared if (fault := _fault(hit, found, settings))]
    if faults:
        raise DataError(
            f"elasticsearch: index {index} at {cluster.hosts}: {len(faults)} of {len(hits)} compared passages are not "
            f"those of {corpus}. The first is {faults[0][0].passage_id!r:.80}: {faults[0][1]}. It is of another "
            "corpus, or its id_field, title_field, text_field or text_format is another: name what it has."
        )


def _fault(hit: Hit, found: list[Row], settings: Settings) -> str:
    """How the documents with a passage's id differ from it; empty if they do not."""
    if len(found) != 1:
        return f"{'no' if not found else 'more than one'} document has that {settings.id_field}"
    expected = passage_text(settings.text_format, Passage(hit.passage_id, hit.title, hit.text))
    for name, text in ((settings.title_field, hit.title), (settings.text_field, expected)):
        if name and _plain(value := _value(found[0], name)) != _plain(text):
            return f"{name} is {value!r:.80}, expected {text!r:.80}"
    return ""


def _query_of(id_field: str, passage_id: str) -> Row:
    return {"ids": {"values": [passage_id]}} if id_field == ID else {"term": {id_field: {"value": passage_id}}}


def _hit_parts(fields: list[str]) -> Row:
    """What a search is to give of each hit; `fields` reads them as they were sent, also those of inner objects."""
    return {"_source": False, "fields": [name for name in fields if name != ID], "track_total_hits": False}


def _value(hit: Row, name: str) -> str:
    return " ".join(map(str, hit.get("fields", {}).get(name, [])))


def _id_of(hit: Row, id_field: str) -> str:
    return str(hit[ID]) if id_field == ID else _value(hit, id_field)


def _plain(text: str) -> str:
    """Without the differences that loading makes: composed characters, and one space for each run of white space."""
    return " ".join(composed(text).split())


def _searches(cluster: Cluster, index: str, settings: Settings) -> Searches:
    return Searches(cluster, index, settings.search_batch, _TAKE_OVER, (ID, "fields"))


def _write_rows(keys: array[int], out: Path) -> None:
    """The keys of all ids in order, and the row of each: 16 bytes a passage, memory-mapped in a search."""
    unsorted = np.frombuffer(keys, dtype=np.uint64)
    order = np.argsort(unsorted, kind="stable")
    np.save(out / _KEYS, unsorted[order])
    np.save(out / _ROWS, order.astype(np.int64))


def _connect(settings: Settings) -> Cluster:
    return Cluster(elastic_server.access(), settings.request_timeout_s, settings.retry_s)
