"""Loads a corpus into one Elasticsearch index: every passage once, however often the load or the server is killed.

For each chunk of passages the server is asked how many of them it has, so no progress is stored on our side. A passage
has its row number as `_id` and is created, never overwritten: sending it again changes nothing, while an overwritten
passage would leave a deleted copy, which still counts in the term statistics. Memory holds the chunks that are being
sent, never the corpus.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks import store
from tasks.retrieval import Progress, RetrievalError
from tasks.retrieval.elastic_server import Cluster, PassingError, describe, passes
from tasks.retrieval.elastic_settings import ElasticSettings
from tasks.retrieval.encoders import Encoder, Vectors, passage_text
from tasks.retrieval.passages import count_passages, read_corpus
from tasks.store import DataError, Row
from tasks.text import composed
from tasks.types import Passage

FORMAT = 1
_MAX_REQUEST_BYTES = 8 << 20
_START_S = 30.0  # How long the server waits for the copies of a new index.
_CREATE_S = 90.0
_LONG_S = 600.0  # A refresh or merge after a large load.

Document = tuple[int, bytes]
"""Row number and the two lines of a bulk request that create the passage."""


def index_body(settings: ElasticSettings, corpus_sha256: str, encoder: Encoder | None) -> Row:
    """Settings and strict mapping of the index: exactly what its content and its scores depend on.

    `content` (title and text for BM25) and `vector` are indexed and not kept in `_source`; `title` and `text` are
    kept and not indexed.
    """
    fields: Row = {
        "id": {"type": "keyword"},
        "row": {"type": "long"},
        "title": {"type": "text", "index": False},
        "text": {"type": "text", "index": False},
    }
    index: Row = {"number_of_shards": settings.shards}
    meta: Row = {"format": FORMAT, "corpus_sha256": corpus_sha256}
    if settings.has_terms:
        content = {"type": "text", "analyzer": settings.analyzer, "similarity": "passages", "index_options": "freqs"}
        fields["content"] = content
        index["similarity"] = {"passages": {"type": "BM25", "k1": settings.k1, "b": settings.b}}
        meta["title_weight"] = settings.title_weight
    if settings.has_vectors:
        assert encoder is not None
        fields["vector"] = {
            "type": "dense_vector", "dims": encoder.dimension, "index": True, "similarity": "cosine",
            "index_options": {"type": settings.vectors},
        }  # fmt: skip
        meta |= {"encoder_sha256": encoder.sha256, "max_tokens": settings.max_tokens}
        meta |= {"passage_format": settings.passage_format, "device": settings.device}
    mappings = {"dynamic": "strict", "_meta": meta, "_source": {"includes": ["id", "row", "title", "text"]}}
    return {"settings": {"index": index}, "mappings": {**mappings, "properties": fields}}


def index_name(alias: str, body: Row) -> str:
    """`<alias>-<16 hex digits>`; the digits are a hash of the settings and the mapping."""
    return f"{alias}-{store.digest(body)}"


def mapping_digest(body: Row) -> str:
    """16 hex digits over the mapping."""
    return store.digest(body["mappings"])


def count(cluster: Cluster, index: str, rows: tuple[int, int] | None = None) -> int:
    """How many passages a search can find, of all rows or of `[rows[0], rows[1])`; every shard must answer."""
    query = {"range": {"row": {"gte": rows[0], "lt": rows[1]}}} if rows else {"match_all": {}}

    def request(client: Any) -> int:
        answer = client.count(index=index, query=query)
        if answer["_shards"]["failed"]:
            raise PassingError(f"{answer['_shards']['failed']} of {answer['_shards']['total']} shards did not answer")
        return int(answer["count"])

    return cluster.ask("counting passages", request)


class Loader:
    """One load of one corpus into one index."""

    def __init__(
        self, cluster: Cluster, index: str, body: Row, settings: ElasticSettings, encoder: Encoder | None
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._body = body
        self._settings = settings
        self._encoder = encoder

    def load(self, corpus: Path, progress: Progress) -> int:
        """Load every passage, check their number, point the alias at the index; returns the number of passages.

        Raises:
            DataError: the index has another content or count, or the server refuses a passage; the alias stays.
            RetrievalError: the server refused a request, or did not answer for too long; what is loaded stays.
        """
        num_passages = count_passages(corpus)
        self._check_alias()
        is_new = self._create()
        if is_new or self._refreshed_count() != num_passages:
            if not is_new:
                self._put_settings({"refresh_interval": -1, "blocks.write": None})
            self._send_missing(corpus, progress, -(-num_passages // self._settings.chunk_size), is_new)
            self._check_count(num_passages)
        self._check_deleted()
        # From here on nobody can change what searches find.
        replicas = self._settings.replicas
        self._put_settings({"refresh_interval": None, "blocks.write": True, "number_of_replicas": replicas})
        self._point_alias()
        return num_passages

    def _create(self) -> bool:
        """Create the index if there is none of this name; returns whether it was created."""
        self._check_nodes()
        index = {
            **self._body["settings"]["index"],
            "number_of_replicas": self._settings.replicas,
            "refresh_interval": -1,
        }

        def request(client: Any) -> Any:
            return client.options(ignore_status=400).indices.create(
                index=self._index, settings={"index": index}, mappings=self._body["mappings"],
                wait_for_active_shards="all", timeout=f"{_START_S:g}s",
            )  # fmt: skip

        answer = self._cluster.ask("creating the index", request, _CREATE_S)
        if answer.meta.status != 400:
            if not answer["shards_acknowledged"]:
                raise RetrievalError(
                    f"elasticsearch: index {self._index}: not all its shards and replicas could start"
                    f"{_why_not_started(self._cluster, self._index)}."
                )
            return True

        if answer["error"]["type"] != "resource_already_exists_exception":
            raise DataError(
                f"elasticsearch: the server at {self._cluster.hosts} refused the index: {describe(answer.body)}."
            )
        found = self._cluster.ask("the index's mapping", lambda client: client.indices.get_mapping(index=self._index))
        meta = found[self._index]["mappings"].get("_meta")
        if meta != self._body["mappings"]["_meta"]:
            raise DataError(
                f"elasticsearch: index {self._index} at {self._cluster.hosts} was made for something else: "
                f"found {meta}, expected {self._body['mappings']['_meta']}. "
                "Delete it on the server, or choose another alias."
            )
        return False

    def _check_alias(self) -> None:
        alias = self._settings.alias
        found = self._cluster.ask(
            "who has the alias's name",
            lambda client: client.options(ignore_status=404).indices.resolve_index(name=alias),
        )
        if found.meta.status != 404 and any(index["name"] == alias for index in found["indices"]):
            raise DataError(
                f"elasticsearch: alias={alias!r}: {self._cluster.hosts} has an index of this name. "
                "Choose another alias, or delete that index on the server."
            )

    def _check_nodes(self) -> None:
        health = self._cluster.ask("the cluster's health", lambda client: client.cluster.health())
        nodes, replicas = int(health["number_of_data_nodes"]), self._settings.replicas
        if nodes <= replicas:
            raise DataError(
                f"elasticsearch: replicas={replicas} needs {replicas + 1} data nodes, the cluster at "
                f"{self._cluster.hosts} has {nodes}. Start more, or set replicas to {max(0, nodes - 1)}."
            )

    def _send_missing(self, corpus: Path, progress: Progress, num_chunks: int, is_new: bool) -> None:
        under_way: deque[Future[None]] = deque()
        pool = ThreadPoolExecutor(self._settings.max_in_flight)
        try:
            chunks = _chunks(read_corpus(corpus), self._settings.chunk_size)
            for first, chunk in progress(chunks, num_chunks, "loading chunks"):
                if not is_new and count(self._cluster, self._index, (first, first + len(chunk))) == len(chunk):
                    continue
                for documents in self._requests(first, chunk):
                    if len(under_way) >= self._settings.max_in_flight:
                        under_way.popleft().result()
                    under_way.append(pool.submit(self._send, documents))
            while under_way:
                under_way.popleft().result()
        except BaseException:
            self._cluster.close()  # Requests in other threads stop retrying.
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _requests(self, first: int, chunk: list[Passage]) -> Iterator[list[Document]]:
        """The chunk's documents in requests of bounded size."""
        vectors = self._encode(first, chunk) if self._encoder is not None else None
        documents: list[Document] = []
        size = 0
        for i, passage in enumerate(chunk):
            document = (first + i, self._lines(first + i, passage, None if vectors is None else vectors[i].tolist()))
            if documents and size + len(document[1]) > _MAX_REQUEST_BYTES:
                yield documents
                documents, size = [], 0
            documents.append(document)
            size += len(document[1])
        yield documents

    def _encode(self, first: int, chunk: list[Passage]) -> Vectors:
        import numpy as np

        assert self._encoder is not None
        texts = [passage_text(self._settings.passage_format, passage) for passage in chunk]
        vectors = self._encoder.encode(texts, self._settings.batch_size)
        if not np.isfinite(vectors).all():
            raise DataError(
                f"encoder {self._settings.encoder!r} gave a vector that is not finite for a passage of rows "
                f"{first} to {first + len(chunk) - 1}."
            )
        return vectors

    def _lines(self, row: int, passage: Passage, vector: list[float] | None) -> bytes:
        fields: Row = {"id": passage.id, "row": row, "title": passage.title, "text": passage.text}
        if self._settings.has_terms:
            content = "\n".join([*[passage.title] * self._settings.title_weight, passage.text])
            fields["content"] = composed(content)
        if vector is not None:
            fields["vector"] = vector
        return f'{{"create":{{"_id":"{row}"}}}}\n{store.dump(fields)}'.encode()

    def _send(self, documents: list[Document]) -> None:
        """Create documents; those that a busy server did not take are sent again."""
        waiting = documents

        def request(client: Any) -> None:
            nonlocal waiting
            lines = [line for _, line in waiting]
            answer = client.bulk(index=self._index, operations=lines, filter_path="items.*.status,items.*.error")
            waiting, reason = self._rejected(waiting, [item["create"] for item in answer["items"]])
            if waiting:
                raise PassingError(f"{len(waiting)} of {len(lines)} passages not taken: {reason}")

        self._cluster.ask(f"loading rows {documents[0][0]} to {documents[-1][0]}", request)

    def _rejected(self, documents: list[Document], results: list[Row]) -> tuple[list[Document], str]:
        """The documents to send again, and why. Status 409 is no fault: a request whose answer was lost has made it."""
        again, reason = [], ""
        for document, result in zip(documents, results, strict=True):
            status = int(result["status"])
            if passes(status):
                again.append(document)
                reason = describe(result)
            elif status >= 400 and status != 409:
                raise DataError(
                    f"elasticsearch: the server at {self._cluster.hosts} refused the passage of row {document[0]} "
                    f"(counted from 0): HTTP {status}: {describe(result)}."
                )
        return again, reason

    def _refreshed_count(self) -> int:
        def request(client: Any) -> None:
            shards = client.indices.refresh(index=self._index)["_shards"]
            if shards["failed"]:
                raise PassingError(f"{shards['failed']} of {shards['total']} shards did not refresh")

        self._cluster.ask("making passages searchable", request, _LONG_S)
        return count(self._cluster, self._index)

    def _check_count(self, expected: int) -> None:
        found = self._refreshed_count()
        if found != expected:
            reason = "something else writes to it" if found > expected else "the server lost some"
            raise DataError(
                f"elasticsearch: index {self._index} at {self._cluster.hosts} has {found} passages, the corpus "
                f"{expected}: {reason}. Alias {self._settings.alias!r} stays as it was. Delete the index on the server "
                "and run again."
            )

    def _check_deleted(self) -> None:
        """Remove deleted copies of passages by a merge: they would still count in the statistics of BM25."""

        def deleted(client: Any) -> int:
            return int(client.indices.stats(index=self._index, metric="docs")["_all"]["primaries"]["docs"]["deleted"])

        if self._cluster.ask("the index's statistics", deleted):
            self._cluster.ask(
                "merging the index",
                lambda client: client.indices.forcemerge(index=self._index, max_num_segments=1),
                _LONG_S,
            )

    def _put_settings(self, settings: Row) -> None:
        self._cluster.ask(
            "the index's settings",
            lambda client: client.indices.put_settings(index=self._index, settings={"index": settings}),
        )

    def _point_alias(self) -> None:
        """One atomic change: the alias names this index and no other."""
        alias = self._settings.alias
        ours = re.compile(re.escape(alias) + "-[0-9a-f]{16}")

        def request(client: Any) -> None:
            answer = client.options(ignore_status=404).indices.get_alias(name=alias)
            holders = [] if answer.meta.status == 404 else sorted(answer.body)
            actions: list[Row] = [{"add": {"index": self._index, "alias": alias}}]
            for index in holders:
                if index != self._index and self._settings.old_index == "remove" and ours.fullmatch(index):
                    actions.append({"remove_index": {"index": index}})
                elif index != self._index:
                    actions.append({"remove": {"index": index, "alias": alias}})
            if holders != [self._index]:
                client.indices.update_aliases(actions=actions)

        self._cluster.ask(f"pointing alias {alias!r} at {self._index}", request)


def _why_not_started(cluster: Cluster, index: str) -> str:
    """What the server says of a copy of the index that has no node, as the end of a message."""
    shards: Any = cluster.ask("the index's shards", lambda client: client.cat.shards(index=index, format="json"))
    lost = next((shard for shard in shards if shard["state"] == "UNASSIGNED"), None)
    if lost is None:
        return ""

    def request(client: Any) -> Any:
        return client.options(ignore_status=400).cluster.allocation_explain(
            index=index, shard=int(lost["shard"]), primary=lost["prirep"] == "p"
        )

    of_nodes = cluster.ask("why a copy did not start", request).get("node_allocation_decisions") or []
    deciders = [decider for node in of_nodes for decider in node.get("deciders") or []]
    # Two copies of a shard are never on one node, which is no fault.
    refusals = [decider["explanation"] for decider in deciders if decider["decider"] != "same_shard"]
    return "".join(f"; {reason.rstrip('.')}" for reason in dict.fromkeys(refusals))[:1000]


def _chunks(passages: Iterable[Passage], size: int) -> Iterator[tuple[int, list[Passage]]]:
    """(row of the first, passages) of every chunk."""
    passages, first = iter(passages), 0
    while chunk := list(itertools.islice(passages, size)):
        yield first, chunk
        first += len(chunk)
