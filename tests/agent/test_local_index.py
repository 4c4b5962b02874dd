"""A local index is searched on several threads at once, beside generation, and its passages stay the same."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import conf, retrieval, store
from tasks.generate.rows import RowsGenerator, RowsSession
from tasks.retrieval import Retriever, bm25, dense, manifest, scoring
from tasks.types import Hit
from tests.agent.test_free_play import eager, play
from tests.tiny import PLACES

KINDS = ("bm25", "flat", "hnsw")
WORDS = [f"word{number}" for number in range(300)]
NUM_PASSAGES, NUM_QUERIES = 3_000, 3_000
PASSAGES = [" ".join(random.Random(row).choices(WORDS, k=20)) for row in range(NUM_PASSAGES)]
QUERIES = [" ".join(random.Random(-1 - number).choices(WORDS, k=8)) for number in range(NUM_QUERIES)]
NOT_SOON_S = 5.0


class TableEncoder:
    """Unit vectors, sums of the words' own."""

    dimension = 64
    sha256 = "table"

    def __init__(self) -> None:
        words = [*WORDS, *PLACES, "rules", "other"]
        table = np.random.default_rng(0).standard_normal((len(words), self.dimension))
        self._vectors = dict(zip(words, table.astype(np.float32), strict=True))

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        other = self._vectors["other"]
        vectors = np.stack([sum((self._vectors.get(w, other) for w in text.split()), 0 * other) for text in texts])
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def made(kind: str, texts: list[str], folder: Path) -> Any:
    """An index of these passages, opened."""
    corpus, out = folder / f"{kind}.jsonl", folder / kind
    store.write_jsonl(corpus, ({"id": f"p{i}", "title": "", "text": text} for i, text in enumerate(texts)))
    if kind == "bm25":
        retrieval.build(corpus, out, bm25.Settings("bm25", stemmer="none", stopwords="none"))
        return retrieval.open_retriever(out)
    settings = dense.Settings("dense", index=kind, passage_format="{text}")  # type: ignore[arg-type]
    with store.replacing_folder(out) as work:
        sha = manifest.corpus_sha256(corpus)
        built = dense.build(corpus, sha, work, settings, None, retrieval.silent, TableEncoder())
        manifest.write(work, "dense", conf.plain(settings), sha, built)
    return dense.open_index(out, manifest.read(out), encoder=TableEncoder())


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {kind: made(kind, PASSAGES, tmp_path_factory.mktemp("local")) for kind in KINDS}


@dataclass
class Watch:
    """A function, and when each thread was inside."""

    inner: Callable[..., Any]
    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def __call__(self, *given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = self.inner(*given, **named)
        self.spans.append((threading.get_ident(), began, time.perf_counter()))
        return found


def watched(retriever: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The compiled part of its searches, under watch."""
    owner, name = (scoring, "_best_rows") if kind == "bm25" else (retriever._index, "search")
    watch = Watch(getattr(owner, name))
    monkeypatch.setattr(owner, name, watch)
    return watch


@pytest.fixture
def no_switches() -> Iterator[None]:
    """The interpreter lock changes hands only where its holder releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(NOT_SOON_S)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", KINDS)
def test_searches_run_at_the_same_time(kind, indexes, monkeypatch, no_switches):
    """While one thread is inside the compiled part of a long search, other threads begin and end searches of their own.

    If that part kept the interpreter lock, none of them would come in: nobody gets it here unless it is released.
    """
    retriever = indexes[kind]
    retriever.search(QUERIES[:1], 5)  # Compiles.
    watch = watched(retriever, kind, monkeypatch)

    is_over = threading.Event()

    def keep_searching(number: int) -> None:
        while not is_over.is_set():
            retriever.search(QUERIES[number : number + 1], 5)

    others = [threading.Thread(target=keep_searching, args=(number,)) for number in range(2)]
    for one in others:
        one.start()
    retriever.search(QUERIES, 5)
    is_over.set()
    for one in others:
        one.join()

    (mine,) = [span for span in watch.spans if span[0] == threading.get_ident()]
    beside = [thread for thread, began, ended in watch.spans if mine[1] < began and ended < mine[2]]
    assert len(beside) >= 10, "searches of other threads began and ended meanwhile"


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_find_what_one_finds_and_search_no_batch_twice(kind, indexes, monkeypatch):
    """In batches as of a rollout."""
    retriever: Retriever = indexes[kind]
    batches = [QUERIES[first : first + 8] for first in range(0, NUM_QUERIES, 8)]
    wanted = [retriever.search(batch, 5) for batch in batches]
    watch = watched(retriever, kind, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda batch: retriever.search(batch, 5), batches))
    assert found == wanted
    assert len(watch.spans) == len(batches)


@dataclass
class Watched:
    """A retriever, and when each thread was inside."""

    watch: Watch

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        found: list[list[Hit]] = self.watch(queries, top_k)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_beside_searches_on_one_and_on_four_threads(kind, tokenizer, tmp_path, monkeypatch):
    texts = [f"{a} rules {b} ." for a in PLACES for b in PLACES]
    index, generator = made(kind, texts, tmp_path), RowsGenerator(eager(tokenizer), tokenizer)
    wanted, lock_step, _ = play(generator, tokenizer, index, 0)
    assert sum(len(turn.hits) for t in wanted for turn in t.turns) > 20
    writes = Watch(RowsSession.advance)
    monkeypatch.setattr(RowsSession, "advance", partialmethod(writes))
    for overlap in (1, 4):
        retriever = Watched(Watch(index.search))
        found, player, _ = play(generator, tokenizer, retriever, overlap)
        assert found == wanted
        assert player.cost == lock_step.cost

        searches = retriever.watch.spans
        threads = {thread for thread, _, _ in searches}
        assert threading.get_ident() not in threads
        assert len(threads) == 1 if overlap == 1 else 1 < len(threads) <= overlap
        beside = [s for s in searches if any(began < s[2] and s[1] < ended for _, began, ended in writes.spans)]
        assert beside, "rows wrote on while others searched"
