"""Search on an Elasticsearch cluster: BM25, exact or approximate nearest vectors, or both fused on our side.

The server holds the passages, in an index named `<alias>-<digest of corpus and settings>`; our folder holds the
manifest alone. A build loads what is not there yet, counts, and only then points the alias at the index; searches
use the index by its own name, so that somebody else's alias switch changes no result. See `elastic_server` for
addresses and secrets (they are no settings) and `elastic_load` for the load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.conf import require
from tasks.retrieval import Progress, RetrievalError, check_request, elastic_server
from tasks.retrieval.elastic_load import Loader, count, index_body, index_name, mapping_digest
from tasks.retrieval.elastic_search import Searches, clean
from tasks.retrieval.elastic_server import Cluster
from tasks.retrieval.elastic_settings import MAX_HITS, ElasticSettings
from tasks.retrieval.encoders import (
    Encoder,
    SentenceEncoder,
    check_encoder,
)
from tasks.retrieval.fusion import fuse
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.store import DataError, Row
from tasks.types import Hit

_SPARE = 16
_WORST_COSINE = -1.0


@dataclass(frozen=True)
class Settings(ElasticSettings):
    """`conf/retriever/*.yaml` with `backend: elasticsearch`.

    The class is defined here, because a stage depends on the source file of its settings' class.
    """


def build(
    corpus: Path,
    corpus_sha256: str,
    out: Path,
    settings: Settings,
    scratch: Path | None,
    progress: Progress,
    encoder: Encoder | None = None,
) -> Built:
    """Load the corpus; see `tasks.retrieval.build`. `out` stays empty, `scratch` unused: the server knows its state.

    If the load or the server was killed, the next load continues where that one stopped. `encoder` takes the place of
    the one that the settings name.

    Raises:
        DataError: no access, versions that do not fit, an index of another content, a wrong count (the alias then
            stays where it was), or an outage that outlasted `retry_s`.
    """
    encoder = (encoder or _load_encoder(settings)) if settings.has_vectors else None
    body = index_body(settings, corpus_sha256, encoder)
    index = index_name(settings.alias, body)
    cluster = _connect(settings)
    try:
        cluster.check_versions()
        num_passages = Loader(cluster, index, body, settings, encoder).load(corpus, progress)
    except RetrievalError as error:
        raise DataError(f"{error} Run again when it is mended: the load goes on where it stopped.") from None
    finally:
        cluster.close()
    details: Row = {"alias": settings.alias, "index": index, "mapping_digest": mapping_digest(body)}
    if encoder is not None:
        details |= {"encoder_sha256": encoder.sha256, "dimension": encoder.dimension}
    libraries = ("sentence-transformers", "torch") if settings.has_vectors else ()
    return Built(num_passages, details, ("elasticsearch", *libraries))


def open_index(
    index_dir: Path, manifest: Manifest, num_threads: int = 1, encoder: Encoder | None = None
) -> ElasticsearchRetriever:
    """Open what `build` loaded; `num_threads` is not used, for the server has its own.

    Raises:
        DataError: no access, versions that do not fit, another encoder, or the server has not that index with
            that mapping and that many passages; the message says how to load it again.
    """
    require(num_threads >= 1, "num_threads", num_threads, "at least 1")
    where = index_dir / NAME
    settings = conf.fill(Settings, manifest.settings, str(where))
    if settings.has_vectors:
        encoder = encoder or _load_encoder(settings)
        check_encoder(encoder, settings.encoder, manifest.details.get("encoder_sha256"), where)
    index = str(manifest.details.get("index"))
    cluster = _connect(settings)
    try:
        cluster.check_versions()
        _check_index(cluster, index, manifest, where)
    except RetrievalError as error:
        raise DataError(str(error)) from None
    return ElasticsearchRetriever(cluster, index, settings, manifest.num_passages, encoder)


class ElasticsearchRetriever:
    """Searches one index; see `tasks.retrieval.Retriever`.

    Scores are the server's BM25, a cosine (`knn`) or the fused score (`hybrid`). A query without an indexed term
    scores 0 everywhere in `bm25`, so its hits are the first passages of the corpus; passages that fill up a short
    result are chosen the same way. Of a query, the first 1,000 words and signs count. Equal cosines are in corpus order
    unless more than 16 further passages have the cosine of the last hit. More than 10,000 hits are refused.
    """

    def __init__(
        self, cluster: Cluster, index: str, settings: Settings, num_passages: int, encoder: Encoder | None = None
    ) -> None:
        self._searches = Searches(cluster, index, settings.search_batch, _RELOAD)
        self._settings = settings
        self._num_passages = num_passages
        self._encoder = encoder
        self._first: list[Hit] = []

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        wanted = min(top_k, self._num_passages)
        if wanted > MAX_HITS:
            raise ValueError(f"top_k={top_k}: Elasticsearch gives at most {MAX_HITS} hits of one search. Ask for less.")
        if not queries:
            return []
        if self._settings.mode == "bm25":
            return [self._filled(found, wanted, 0.0) for found in self._by_terms(queries, wanted)]
        if self._settings.mode == "knn":
            return [self._filled(found, wanted, _WORST_COSINE) for found in self._by_vectors(queries, wanted)]
        depth = min(max(self._settings.fusion_depth, wanted), self._num_passages)
        rankings = zip(self._by_terms(queries, depth), self._by_vectors(queries, depth), strict=True)
        k, weights = self._settings.fusion_k, self._settings.fusion_weights
        return [self._filled(fuse(both, wanted, k, weights), wanted, 0.0) for both in rankings]

    def _by_terms(self, queries: list[str], wanted: int) -> list[list[Hit]]:
        """Passages that share a term with the query, at most `wanted`."""
        bodies = [self._body({"match": {"content": {"query": clean(query)}}}, wanted) for query in queries]
        return self._ask(bodies, lambda score: score)

    def _by_vectors(self, queries: list[str], wanted: int) -> list[list[Hit]]:
        assert self._encoder is not None
        texts = [self._settings.query_prefix + query for query in queries]
        try:
            vectors = self._encoder.encode(texts, self._settings.batch_size)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            raise RetrievalError(f"elasticsearch: the encoder failed: {type(error).__name__}: {error}") from error
        size = min(wanted + _SPARE, self._num_passages, MAX_HITS)
        candidates = max(size, self._settings.num_candidates)
        bodies = [
            self._body(
                {"knn": {"field": "vector", "query_vector": vector, "k": size, "num_candidates": candidates}}, size
            )
            for vector in vectors.tolist()
        ]
        # The server's score of a cosine c is (1 + c) / 2.
        return [found[:wanted] for found in self._ask(bodies, lambda score: 2.0 * score - 1.0)]

    @staticmethod
    def _body(query: Row, size: int) -> Row:
        order = [{"_score": "desc"}, {"row": "asc"}]
        return {"query": query, "size": size, "sort": order, "track_total_hits": False}

    def _filled(self, hits: list[Hit], wanted: int, floor: float) -> list[Hit]:
        """Exactly `wanted` hits: what was found, then the first passages of the corpus that were not, at `floor`."""
        if len(hits) == wanted:
            return hits
        first = self._first
        if len(first) < wanted:  # The first `wanted` rows always hold enough that were not found.
            query = {"query": {"range": {"row": {"lt": wanted}}}, "size": wanted, "sort": [{"row": "asc"}]}
            (first,) = self._ask([query], lambda score: 0.0)
            if len(first) != wanted:
                raise self._searches.lost(f"found {len(first)} of its first {wanted} passages")
            self._first = first
        found = {hit.passage_id for hit in hits}
        rest = [replace(hit, score=floor) for hit in first if hit.passage_id not in found]
        return hits + rest[: wanted - len(hits)]

    def _ask(self, bodies: list[Row], to_score: Any) -> list[list[Hit]]:
        """One list of hits a body, in the server's order."""
        return [[_hit(found, to_score) for found in answer] for answer in self._searches.ask(bodies)]


_RELOAD = "To load it again: dvc repro --force --single-item index"


def _hit(found: Row, to_score: Any) -> Hit:
    source = found["_source"]
    return Hit(source["id"], to_score(found.get("_score")), source["title"], source["text"])


def _check_index(cluster: Cluster, index: str, manifest: Manifest, where: Path) -> None:
    missing = (404,)
    found = cluster.ask(
        "the index's mapping", lambda client: client.options(ignore_status=missing).indices.get_mapping(index=index)
    )
    if found.meta.status in missing:
        raise DataError(
            f"{where}: the server at {cluster.hosts} has no index {index}: it was deleted, or {elastic_server.URL} "
            f"names another cluster. {_RELOAD}"
        )

    meta = found.body[index]["mappings"].get("_meta", {})
    if meta.get("corpus_sha256") != manifest.corpus_sha256:
        raise DataError(
            f"{where}: index {index} at {cluster.hosts} holds another corpus ({str(meta.get('corpus_sha256'))[:12]}), "
            f"expected {manifest.corpus_sha256[:12]}. Delete that index on the server. {_RELOAD}"
        )
    found_passages = count(cluster, index)
    if found_passages != manifest.num_passages:
        raise DataError(
            f"{where}: index {index} at {cluster.hosts} has {found_passages} passages, "
            f"expected {manifest.num_passages}. {_RELOAD}"
        )


def _connect(settings: Settings) -> Cluster:
    return Cluster(elastic_server.access(), settings.request_timeout_s, settings.retry_s)


def _load_encoder(settings: Settings) -> Encoder:
    return SentenceEncoder(settings.encoder, settings.max_tokens, settings.device)
