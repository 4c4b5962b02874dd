"""The settings of the backend `elasticsearch`, shared by its load and its search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tasks.conf import Share, require
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
        b: how strongly scores are normalised by the length of the passage, in [0, 1].
        analyzer: an analyzer of the server: `english` (stop words, Porter stemming), `standard`, ...
        title_weight: how many times each word of the title is counted; 0 leaves the title out of BM25.
        encoder, query_prefix, passage_format, max_tokens, batch_size, device: as in `dense`; not used by `bm25`.
        vectors: `flat` compares with every vector and is exact; `hnsw` and `int8_hnsw` are approximate, and their
            graph depends on the order in which passages arrived, so results may differ between two loads.
        num_candidates: vectors that `hnsw` and `int8_hnsw` compare on every shard.
        fusion_depth: passages taken from each ranking that is fused.
        fusion_k: constant of reciprocal rank fusion.
        fusion_weights: of the ranking by terms and of that by vectors.
        shards, replicas: of the index; neither changes a BM25 score.
        chunk_size: passages of one bulk request (which is split further above 8 MB).
        max_in_flight: bulk requests under way at once.
        search_batch: queries of one request.
        request_timeout_s: how long the server may take for one request.
        retry_s: how long a failing request is made again before it counts as failed.
        old_index: what happens to the index that the alias named before.
    """

    backend: Literal["elasticsearch"]
    mode: Literal["bm25", "knn", "hybrid"] = "bm25"
    alias: str = "breadcrumb"
    k1: NonNegativeFloat = 1.5
    b: Share = 0.75
    analyzer: Annotated[str, Field(min_length=1)] = "english"
    title_weight: NonNegativeInt = 1
    encoder: str = MINILM
    query_prefix: str = ""
    passage_format: str = PASSAGE_FORMAT
    max_tokens: NonNegativeInt = 0
    batch_size: PositiveInt = 32
    device: Literal["cpu", "cuda"] = "cpu"
    vectors: Literal["flat", "hnsw", "int8_hnsw"] = "flat"
    num_candidates: Annotated[int, Field(ge=1, le=MAX_HITS)] = 100
    fusion_depth: Annotated[int, Field(ge=1, le=MAX_HITS)] = 100
    fusion_k: NonNegativeFloat = 3.0
    fusion_weights: tuple[PositiveFloat, PositiveFloat] = (1.0, 0.7)
    shards: PositiveInt = 1
    replicas: NonNegativeInt = 0
    chunk_size: PositiveInt = 500
    max_in_flight: Annotated[int, Field(ge=1, le=CONNECTIONS)] = 2
    search_batch: PositiveInt = 64
    request_timeout_s: PositiveFloat = 30.0
    retry_s: NonNegativeFloat = 60.0
    old_index: Literal["keep", "remove"] = "keep"

    def __post_init__(self) -> None:
        good = re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,99}", self.alias) is not None
        require(good, "alias", self.alias, "1 to 100 of a-z, 0-9, '_', '.', '-', the first a letter or digit")
        require_passage_format(self.passage_format)

    @property
    def requires(self) -> str:
        """See `tasks.libraries`."""
        return "dense" if self.has_vectors else ""

    @property
    def has_terms(self) -> bool:
        """Whether BM25 is used."""
        return self.mode != "knn"

    @property
    def has_vectors(self) -> bool:
        """Whether an encoder is used."""
        return self.mode != "bm25"
