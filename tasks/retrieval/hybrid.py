"""Hybrid search fuses the rankings of several backends by rank, and optionally reranks the first hits.

Every part is an index of its own in a subfolder, with its own manifest. All parts give their first `depth` hits,
whatever `top_k` is, and reciprocal rank fusion orders them; so a short result is always the beginning of a longer
one. A hit with score 0 matched nothing, so its rank adds nothing. Equal fused scores are in corpus order. If this gives
too few hits, the search is repeated with a depth `GROWTH` times larger, and the new hits are put behind the others.
Their scores are below zero, so that sorting by score keeps them there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from tasks import conf, retrieval
from tasks.conf import require
from tasks.data.ingest import key_of
from tasks.retrieval import Progress, RetrievalError, Retriever, check_request
from tasks.retrieval.fusion import fuse
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import read_corpus
from tasks.retrieval.rerank import CrossEncoder, RerankConf
from tasks.store import DataError
from tasks.types import Hit, Passage

KEYS, ROWS = "keys.npy", "rows.npy"
GROWTH = 8
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: hybrid`.

    Attributes:
        parts: name -> complete settings of a backend, as in a file of `conf/retriever/`; at least two.
        depth: number of hits that each part gives.
        k: damps the first ranks of the fusion, see `tasks.retrieval.fusion`.
        weights: name of a part -> its weight in the fusion; 1 for a part that is not named.
        reranker: puts the first fused hits into the order of a cross-encoder.
    """

    backend: Literal["hybrid"]
    parts: dict[str, Any]
    depth: PositiveInt = 100
    k: NonNegativeFloat = 60.0
    weights: dict[str, float] = field(default_factory=dict)
    reranker: RerankConf = field(default_factory=RerankConf)

    def __post_init__(self) -> None:
        require(len(self.parts) >= 2, "parts", list(self.parts), "at least two")
        parts = {}
        for name, part in self.parts.items():
            require(bool(_NAME.fullmatch(name)), "parts", name, "names of a-z, 0-9 and _, a letter first")
            if isinstance(part, Mapping):
                part = retrieval.settings_of(part, f"parts.{name}")
            require(hasattr(part, "backend"), f"parts.{name}", part, "a mapping with `backend` and its settings")
            parts[name] = part
        object.__setattr__(self, "parts", parts)
        for name, weight in self.weights.items():
            require(name in parts, "weights", name, f"names of parts: {', '.join(parts)}")
            require(weight > 0, f"weights.{name}", weight, "more than 0; leave the part out instead")
        deepest = self.reranker.depth if self.reranker.model else 1
        require(deepest <= self.depth, "reranker.depth", deepest, f"at most depth={self.depth}")


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Fill folder `out`; see `tasks.retrieval.build`. Each part resumes from `scratch` as it would alone."""
    reranker = _load_reranker(settings)  # First, so that a wrong folder is found before the parts are built.
    num_passages = _write_rows(read_corpus(corpus), out)
    for name, part in settings.parts.items():
        built = retrieval.build_part(corpus, out / name, part, scratch, progress)
        if built["num_passages"] != num_passages:
            raise DataError(
                f"parts.{name}: indexed {built['num_passages']} passages, {corpus} has {num_passages}. Build it again."
            )
    details = {"reranker_sha256": reranker.sha256 if reranker else None}
    return Built(num_passages, details, ("numpy", *(("torch", "transformers") if reranker else ())))


def open_index(index_dir: Path, manifest: Manifest, num_threads: int = 1) -> HybridRetriever:
    """Open a folder that `build` filled.

    Raises:
        DataError: a part cannot be opened, or the reranker is not the one the index was built with.
    """
    settings = conf.fill(Settings, manifest.settings, str(index_dir / NAME))
    reranker = _load_reranker(settings)
    found, expected = reranker.sha256 if reranker else None, manifest.details.get("reranker_sha256")
    if found != expected:
        raise DataError(
            f"{index_dir / NAME}: built with another reranker: {settings.reranker.model!r} has hash {found}, "
            f"the index was built with {expected}. Build the index again."
        )
    # The manifest of the whole index names every file of the parts, so they are checked already.
    parts = {
        name: retrieval.open_retriever(index_dir / name, num_threads=num_threads, verify=False)
        for name in settings.parts
    }
    return HybridRetriever(settings, parts, _Rows(index_dir), reranker.scores if reranker else None, num_threads > 1)


class HybridRetriever:
    """Searches every part and fuses the results; see `tasks.retrieval.Retriever`.

    A score is the fused one, at most S = sum of weights / (k + 1). A reranked hit has S plus the score of the
    cross-encoder, and so is above every hit that was not reranked. A hit that no part has among its first `depth` has
    its fused score at the depth where it was found, minus S for every time the search was repeated with a larger depth.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Mapping[str, Retriever],
        rows: _Rows,
        rerank: Callable[[str, list[Hit]], list[float]] | None = None,
        at_once: bool = False,
    ) -> None:
        """Compose the parts.

        Args:
            settings: of the fusion; its parts and reranker are those given here.
            parts: name -> retriever, all over the same corpus.
            rows: the place of each passage in that corpus.
            rerank: scores in (0, 1) of one query's hits.
            at_once: search the parts in threads, with the same results.
        """
        self._settings, self._parts, self._rows, self._rerank = settings, dict(parts), rows, rerank
        self._weights = [settings.weights.get(name, 1.0) for name in self._parts]
        self._most = sum(self._weights) / (settings.k + 1)
        self._threads = ThreadPoolExecutor(len(self._parts), "part") if at_once else None

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        check_request(queries, top_k)
        if not queries:
            return []
        wanted, depth = min(top_k, len(self._rows)), min(self._settings.depth, len(self._rows))
        results = self._fused(queries, depth)
        if self._rerank is not None:
            results = [self._reranked(*pair, self._rerank) for pair in zip(queries, results, strict=True)]
        below = 0.0
        while short := [i for i, hits in enumerate(results) if len(hits) < wanted]:
            if depth == len(self._rows):
                found = len(results[short[0]])
                raise RetrievalError(f"hybrid: the parts found {found} passages in all, expected {depth}.")
            depth, below = min(depth * GROWTH, len(self._rows)), below + self._most
            for i, hits in zip(short, self._fused([queries[i] for i in short], depth), strict=True):
                known = {hit.passage_id for hit in results[i]}
                results[i] += [replace(h, score=h.score - below) for h in hits if h.passage_id not in known]
        return [hits[:wanted] for hits in results]

    def _fused(self, queries: list[str], depth: int) -> list[list[Hit]]:
        """All passages that any part has among its first `depth`, best first, for each query."""
        run = self._threads.map if self._threads else map
        rankings = list(run(lambda name: self._ask(name, queries, depth), self._parts))
        return [self._fuse(found) for found in zip(*rankings, strict=True)]

    def _fuse(self, rankings: Sequence[list[Hit]]) -> list[Hit]:
        # BM25 fills its list with passages that share no word with the query; their ranks mean nothing.
        matched = [[hit for hit in ranking if hit.score != 0] for ranking in rankings]
        fused = fuse(matched, sum(map(len, matched)), self._settings.k, self._weights)
        known = {hit.passage_id for hit in fused}
        rest = {hit.passage_id: replace(hit, score=0.0) for ranking in rankings for hit in ranking}
        return self._ordered([*fused, *(hit for name, hit in rest.items() if name not in known)])

    def _ask(self, name: str, queries: list[str], depth: int) -> list[list[Hit]]:
        try:
            results = self._parts[name].search(queries, depth)
        except RetrievalError as error:
            raise type(error)(f"hybrid: part {name!r}: {error}") from error
        counts = [len(hits) for hits in results]
        if counts != [depth] * len(queries):
            raise RetrievalError(f"hybrid: part {name!r}: found {counts} hits, expected {depth} for each query.")
        return results

    def _reranked(self, query: str, hits: list[Hit], rerank: Callable[[str, list[Hit]], list[float]]) -> list[Hit]:
        first, rest = hits[: self._settings.reranker.depth], hits[self._settings.reranker.depth :]
        try:
            scores = rerank(query, first)
        except (MemoryError, RuntimeError, IndexError) as error:
            raise RetrievalError(f"hybrid: the reranker failed: {type(error).__name__}: {error}") from error
        scored = [replace(hit, score=self._most + score) for hit, score in zip(first, scores, strict=True)]
        return [*self._ordered(scored), *rest]

    def _ordered(self, hits: Iterable[Hit]) -> list[Hit]:
        hits = list(hits)
        rows = self._rows.of([hit.passage_id for hit in hits])
        return [hit for hit, _ in sorted(zip(hits, rows, strict=True), key=lambda pair: (-pair[0].score, pair[1]))]


class _Rows:
    """The row of each passage in the corpus, as sorted hashes of the ids with their rows, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._keys = np.load(folder / KEYS, mmap_mode="r")
        self._rows = np.load(folder / ROWS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, passage_ids: list[str]) -> list[int]:
        """The row of each passage.

        Raises:
            RetrievalError: one is not in the corpus.
        """
        keys = np.fromiter(map(key_of, passage_ids), np.uint64, len(passage_ids))
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        for i in np.flatnonzero(self._keys[at] != keys):
            raise RetrievalError(f"hybrid: a part found passage {passage_ids[i]!r}, which is not in the corpus.")
        rows: list[int] = self._rows[at].tolist()
        return rows


def _write_rows(passages: Iterable[Passage], folder: Path) -> int:
    """Write the files of `_Rows`, 16 bytes per passage; returns the number of passages."""
    keys = np.frombuffer(array("Q", (key_of(passage.id) for passage in passages)), np.uint64)
    rows = np.argsort(keys, kind="stable")
    np.save(folder / KEYS, keys[rows])
    np.save(folder / ROWS, rows)
    return len(keys)


def _load_reranker(settings: Settings) -> CrossEncoder | None:
    return CrossEncoder(settings.reranker) if settings.reranker.model else None
