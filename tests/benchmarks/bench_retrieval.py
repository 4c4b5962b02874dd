"""Overhead of `search` over the engines below it: our bm25 against raw bm25s, our dense against raw FAISS.

    python -m tests.benchmarks.bench_retrieval

Both sides answer the same queries in the same batches from the same index files with one thread, and both end with
`Hit`s whose passages were read from disk: ours from its memory-mapped rows, bm25s through its own memory-mapped
corpus, FAISS through a line looked up and parsed by hand. Raw bm25s also cuts the queries into terms, as ours does.
Encoding is left out on both sides: each looks up the queries' vectors in the same table. Ours orders equal scores by
passage, fills every place and checks its input; the raw sides do not.

The sides take turns (ours, raw, raw, ours, ...) and medians of CPU-seconds are compared, all threads of the process
together, which other work on the machine moves less than the clock. Exit 1 when ours takes more than a tenth more, or
when the two do not find the same.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks import conf, retrieval, store
from tasks.data.records import passage_row
from tasks.data.world import passages
from tasks.retrieval import dense, nearest
from tasks.retrieval import manifest as manifests
from tasks.retrieval.bm25 import Settings as Bm25Settings
from tasks.retrieval.passages import OFFSETS, ROWS
from tasks.types import Hit
from tests.benchmarks.scale_retrieval import Lookup, WordSums, world

MOST_OVERHEAD = 0.10
BATCH, TOP_K = 64, 10
MOST_DIFFERENT = 0.02
"""Share of scores that may differ: the raw sides choose among equal scores as they like."""

Search = Callable[[list[str]], list[list[Hit]]]


@dataclass(frozen=True)
class Compared:
    """Medians of one pair of sides, CPU-seconds for all queries."""

    name: str
    ours: float
    raw: float
    different: float

    @property
    def overhead(self) -> float:
        """How much more ours takes, as a share of raw."""
        return self.ours / self.raw - 1

    @property
    def holds(self) -> bool:
        """Whether the limits hold."""
        return self.overhead <= MOST_OVERHEAD and self.different <= MOST_DIFFERENT


def compare(name: str, ours: Search, raw: Search, queries: list[str], repeats: int) -> Compared:
    """Time both sides in turns and compare what they found."""
    found, expected = (list(_all(side, queries)) for side in (ours, raw))  # Also the warm-up.
    scores = [np.array([[hit.score for hit in hits] for hits in side], dtype=np.float32) for side in (found, expected)]
    times: dict[Search, list[float]] = {ours: [], raw: []}
    for number in range(repeats):
        for side in (ours, raw) if number % 2 == 0 else (raw, ours):
            started = time.process_time()
            for _ in _all(side, queries):
                pass
            times[side].append(time.process_time() - started)
    different = float(np.mean(~np.isclose(*scores, rtol=1e-5)))
    return Compared(name, statistics.median(times[ours]), statistics.median(times[raw]), different)


def _all(side: Search, queries: list[str]) -> Iterator[list[Hit]]:
    for first in range(0, len(queries), BATCH):
        yield from side(queries[first : first + BATCH])


def bm25_sides(corpus: Path, folder: Path) -> tuple[Search, Search]:
    """Our retriever and raw bm25s over the same arrays."""
    import bm25s
    import Stemmer
    from bm25s.utils.corpus import JsonlCorpus, find_newline_positions, save_mmindex

    settings = Bm25Settings("bm25", stemmer="snowball")
    retrieval.build(corpus, folder / "bm25", settings)
    retriever = retrieval.open_retriever(folder / "bm25")
    index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
    save_mmindex(find_newline_positions(corpus, show_progress=False), path=corpus)
    documents = JsonlCorpus(corpus, show_progress=False, verbosity=0)
    stemmer = Stemmer.Stemmer("english")

    def raw(queries: list[str]) -> list[list[Hit]]:
        tokens = bm25s.tokenize(queries, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
        found = index.retrieve(tokens, corpus=documents, k=TOP_K, n_threads=1, show_progress=False)
        return [
            [Hit(row["id"], score, row["title"], row["text"]) for row, score in zip(rows, scores.tolist(), strict=True)]
            for rows, scores in zip(found.documents, found.scores, strict=True)
        ]

    return lambda queries: retriever.search(queries, TOP_K), raw


def dense_sides(corpus: Path, folder: Path, kind: str, queries: list[str]) -> tuple[Search, Search]:
    """Our retriever and raw FAISS over the same vectors or index file."""
    import faiss

    settings = dense.Settings("dense", index=kind, shard_size=4096)  # type: ignore[arg-type]
    sha256, out, encoder = manifests.corpus_sha256(corpus), folder / kind, Lookup(WordSums(), queries)
    with store.replacing_folder(out) as work:
        built = dense.build(corpus, sha256, work, settings, folder / "scratch", retrieval.silent, WordSums())
        manifest = manifests.write(work, "dense", conf.plain(settings), sha256, built)
    retriever = dense.open_index(out, manifest, encoder=encoder)
    if kind == "flat":
        everything = np.load(out / nearest.FLAT)  # Through IndexFlatIP the same search takes twice as long.
        search = partial(faiss.knn, xb=everything, k=TOP_K, metric=faiss.METRIC_INNER_PRODUCT)
    else:
        numbers = manifest.details["index"]["parameters"]
        index = faiss.read_index(str(out / nearest.INDEX), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
        chosen: Any = faiss
        if kind.startswith("ivf"):  # Its 32 threads that read ahead cost more than they bring.
            chosen.downcast_InvertedLists(chosen.extract_index_ivf(index).invlists).prefetch_nthread = 0
        if kind == "hnsw":
            parameters = chosen.SearchParametersHNSW(efSearch=numbers["ef_search"])
        else:
            parameters = chosen.SearchParametersIVF(nprobe=numbers["nprobe"])
        search = partial(index.search, k=TOP_K, params=parameters)
    offsets = np.load(out / OFFSETS).tolist()
    with (out / ROWS).open("rb") as file:
        rows_of = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def hit(row: int, score: float) -> Hit:
        fields = orjson.loads(rows_of[offsets[row] : offsets[row + 1]])
        return Hit(fields["id"], score, fields["title"], fields["text"])

    def raw(queries: list[str]) -> list[list[Hit]]:
        with nearest.threads(1):
            all_scores, all_rows = search(encoder.encode(queries, BATCH))
        return [
            [hit(row, score) for row, score in zip(rows, scores, strict=True)]
            for rows, scores in zip(all_rows.tolist(), all_scores.tolist(), strict=True)
        ]

    return lambda queries: retriever.search(queries, TOP_K), raw


def table(rows: list[Compared], num_queries: int) -> tuple[str, bool]:
    """The result as Markdown, and whether every limit holds."""
    lines = [
        "| engine | ours CPU-ms/query | raw CPU-ms/query | overhead | scores that differ | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, raw = 1000 * row.ours / num_queries, 1000 * row.raw / num_queries
        verdict = "met" if row.holds else "NOT MET"
        lines.append(f"| {row.name} | {ours:.3f} | {raw:.3f} | {row.overhead:+.1%} | {row.different:.2%} | {verdict} |")
    return "\n".join(lines), all(row.holds for row in rows)


def main() -> None:
    """Run the comparison and end with 1 when a limit does not hold."""
    parser = argparse.ArgumentParser(description="Overhead of search; see the module.")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--types", default="flat,ivf_sq8", help="dense index types, comma separated")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        made = itertools.islice(passages(world(args.passages)), args.passages)
        store.write_jsonl(corpus, (passage_row(passage) for passage in made))
        titles = [row["title"] for _, row in store.read_jsonl(corpus)]
        step = max(1, len(titles) // args.queries)
        queries = [f"Where is {title} located?" for title in titles[::step][: args.queries]]
        rows = [compare("bm25 (bm25s)", *bm25_sides(corpus, folder), queries, args.repeats)]
        for kind in args.types.split(","):
            sides = dense_sides(corpus, folder, kind, queries)
            rows.append(compare(f"dense {kind} (FAISS)", *sides, queries, args.repeats))
    text, met = table(rows, len(queries))
    print(f"{args.passages} passages, {len(queries)} queries in batches of {BATCH}, top {TOP_K}, one thread\n\n{text}")
    print(f"\nLimit: at most {MOST_OVERHEAD:.0%} over raw, at most {MOST_DIFFERENT:.0%} other scores.")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
