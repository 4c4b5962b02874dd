"""The settings of the backend `elasticsearch`, shared by its load and its search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tasks.conf import require
from tasks.retrieval.elastic_server import CONNECTIONS
from tasks.retrieval.encoders import MINILM, PASSAGE_FORMAT, require_passage_format

MAX_HITS = 10_000  # The server's own limit, `index.max_result_window`.


@dataclass(frozen=True)
class ElasticSettings:
    """`conf/retriever/*.yaml` with `backend: elasticsearch`.

    Attributes:
        mode: `bm25`, `knn` (nearest vectors), or `hybrid` (both, by reciprocal rank fusion).
        alias: name for people and other clients; the index itself is `<alias>-<16 hex digits>`.
        k1: saturation of repeated terms; 0 counts a term once.
        b: how far passage length is divided out, in [0, 1].
        analyzer: one the server has: `english` (stop words, Porter stemming), `standard`, ...
        title_weight: how often the title's words are counted; 0 leaves the title out of BM25.
        encoder, query_prefix, passage_format, max_tokens, batch_size, device: as in `dense`; not used by `bm25`.
        vectors: `flat` compares with every vector and is exact; `hnsw` and `int8_hnsw` are approximate, and their
            graph depends on the order in which passages arrived, so results may differ between two loads.
        num_candidates: vectors looked at on every shard by `hnsw` and `int8_hnsw`.
        fusion_depth: passages taken from each ranking that is fused.
        fusion_k: constant of reciprocal rank fusion.
        fusion_weights: of the ranking by terms and of that by vectors.
        shards, replicas: of the index; neither changes a BM25 score.
        chunk_size: passages of one bulk request (which is split further above 8 MB).
        max_in_flight: bulk requests under way at once.
        search_batch: queries of one request.
        request_timeout_s: how long the server may take for one request.
        retry_s: how long a failing request is made again before it counts as failed.
        old_index: what becomes of an index of ours that the alias leaves.
    """

    backend: Literal["elasticsearch"]
    mode: Literal["bm25", "knn", "hybrid"] = "bm25"
    alias: str = "breadcrumb"
    k1: float = 1.5
    b: float = 0.75
    analyzer: str = "english"
    title_weight: int = 1
    encoder: str = MINILM
    query_prefix: str = ""
    passage_format: str = PASSAGE_FORMAT
    max_tokens: int = 0
    batch_size: int = 32
    device: Literal["cpu", "cuda"] = "cpu"
    vectors: Literal["flat", "hnsw", "int8_hnsw"] = "flat"
    num_candidates: int = 100
    fusion_depth: int = 100
    fusion_k: float = 3.0
    fusion_weights: tuple[float, float] = (1.0, 0.7)
    shards: int = 1
    replicas: int = 0
    chunk_size: int = 500
    max_in_flight: int = 2
    search_batch: int = 64
    request_timeout_s: float = 30.0
    retry_s: float = 60.0
    old_index: Literal["keep", "remove"] = "keep"

    def __post_init__(self) -> None:
        good = re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,99}", self.alias) is not None
        require(good, "alias", self.alias, "1 to 100 of a-z, 0-9, '_', '.', '-', the first a letter or digit")
        require_passage_format(self.passage_format)
        require(self.k1 >= 0, "k1", self.k1, "0 or more")
        require(0 <= self.b <= 1, "b", self.b, "a number in [0, 1]")
        require(bool(self.analyzer), "analyzer", self.analyzer, "the name of an analyzer")
        for name in ("title_weight", "max_tokens", "replicas"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("batch_size", "shards", "chunk_size", "max_in_flight", "search_batch"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("num_candidates", "fusion_depth"):
            require(1 <= getattr(self, name) <= MAX_HITS, name, getattr(self, name), f"1 to {MAX_HITS}")
        require(self.max_in_flight <= CONNECTIONS, "max_in_flight", self.max_in_flight, f"at most {CONNECTIONS}")
        require(self.fusion_k >= 0, "fusion_k", self.fusion_k, "0 or more")
        require(min(self.fusion_weights) > 0, "fusion_weights", self.fusion_weights, "two numbers above 0")
        require(self.request_timeout_s > 0, "request_timeout_s", self.request_timeout_s, "seconds, above 0")
        require(self.retry_s >= 0, "retry_s", self.retry_s, "seconds, 0 or more")

    @property
    def has_terms(self) -> bool:
        """Whether BM25 is used."""
        return self.mode != "knn"

    @property
    def has_vectors(self) -> bool:
        """Whether an encoder is used."""
        return self.mode != "bm25"
