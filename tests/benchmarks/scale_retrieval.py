"""A million generated passages through bm25 and dense: seconds, peak memory, bytes on disk, a kill on the way.

    python -m tests.benchmarks.scale_retrieval --passages 1000000 --folder FOLDER

Every step is a process of its own, so that its peak memory (`ru_maxrss`, which counts mapped files too) is its own.
Each backend is built twice: once undisturbed, which gives the figures, and once killed with SIGKILL when half of
its chunks or shards are there, then started again; both folders must hold the same bytes. Searches read the index
through memory maps. Exit 1 when the bytes differ, or a build or search takes more than `--most-gib`.

Encoding is a stand-in: each word has a fixed random vector and a passage is their sum, so that what is measured is
ours and not a model's. The further types of `--types` are built from the vectors of the first and encode nothing.

    python -m tests.benchmarks.scale_retrieval --corpus FILE --types flat,hnsw,ivf_sq8 --no-kill --folder FOLDER

does the same with passages of yours (plain JSONL) and the encoder of `conf/retriever/dense.yaml`: what recall a type
has depends on the vectors, and a stand-in's are harder to sort into lists than a model's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import conf, retrieval, store
from tasks.data.records import passage_row
from tasks.data.world import WorldConf, passages
from tasks.retrieval import dense
from tasks.retrieval import manifest as manifests
from tasks.retrieval.bm25 import Settings as Bm25Settings
from tasks.retrieval.encoders import Encoder, SentenceEncoder, Vectors
from tasks.retrieval.postings import CHUNK_PASSAGES

ROOT = Path(__file__).parents[2]
ENTITIES = {"person": 100, "film": 60, "company": 30, "university": 16, "city": 30, "country": 10}
DISTRACTORS = 60
NUM_QUERIES, TOP_K = 512, 5
SHARD_SIZE = 4096
WORLD = "corpus.jsonl"
GIB = 1 << 30


class WordSums:
    """Unit vectors without a model: the sum of fixed random vectors, one a word, 384 numbers."""

    sha256 = "word-sums-1"
    dimension = 384
    _WORD = re.compile(r"\w+")

    def __init__(self) -> None:
        self._table = np.random.default_rng(0).standard_normal((1 << 14, self.dimension), dtype=np.float32)
        self._place: dict[str, int] = {}

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        """See `tasks.retrieval.encoders.Encoder`; a text without words has the vector of an unknown one."""
        vectors = np.stack([self._table[self._places(text)].sum(0) for text in texts])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _places(self, text: str) -> list[int]:
        words = self._WORD.findall(text.lower()) or [""]
        return [self._place[word] if word in self._place else self._hash(word) for word in words]

    def _hash(self, word: str) -> int:
        self._place[word] = int(store.digest(word), 16) % len(self._table)
        return self._place[word]


class Lookup:
    """Another encoder, for queries that it has encoded beforehand: what is timed is the search."""

    def __init__(self, encoder: Encoder, queries: list[str]) -> None:
        self.sha256, self.dimension = encoder.sha256, encoder.dimension
        self._vectors = dict(zip(queries, encoder.encode(queries, 32), strict=True))

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        """See `tasks.retrieval.encoders.Encoder`."""
        return np.stack([self._vectors[text] for text in texts])


@dataclass(frozen=True)
class Cost:
    """What one process took."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_gib: float
    said: dict[str, Any]


def world(num_passages: int) -> WorldConf:
    """A world of at least that many passages."""
    regions = max(3, -(-num_passages // (sum(ENTITIES.values()) + DISTRACTORS)))
    return WorldConf(
        seed=1,
        regions={"train": regions - 2, "dev": 1, "test": 1},
        entities=ENTITIES,
        distractors=DISTRACTORS,
        questions={"train": 1, "dev": 1, "test": 1},
        hop_shares=(1.0,),
        held_out_share=0.0,
    )


def settings_of(kind: str, is_real: bool) -> Any:
    """`bm25`, or the dense settings of an index type."""
    if kind == "bm25":
        return Bm25Settings("bm25", stemmer="snowball")
    settings = retrieval.load_settings("dense", ROOT)
    assert isinstance(settings, dense.Settings)
    return dataclasses.replace(
        settings,
        index=kind,  # type: ignore[arg-type]
        shard_size=settings.shard_size if is_real else SHARD_SIZE,
    )


def encoder_of(is_real: bool) -> Encoder:
    """The encoder of the settings, or the stand-in."""
    return SentenceEncoder(retrieval.load_settings("dense", ROOT).encoder) if is_real else WordSums()


def step_corpus(folder: Path, num_passages: int) -> dict[str, Any]:
    """Write the world."""
    rows = (passage_row(passage) for passage in itertools.islice(passages(world(num_passages)), num_passages))
    count = store.write_jsonl(folder / WORLD, rows)
    return {"passages": count, "bytes": (folder / WORLD).stat().st_size}


def step_build(folder: Path, corpus: Path | None, kind: str, out: str, scratch: str) -> dict[str, Any]:
    """Build one index; `corpus` None takes the world."""
    settings, path = settings_of(kind, corpus is not None), corpus or folder / WORLD
    if kind == "bm25":
        manifest = retrieval.build(path, folder / out, settings, folder / scratch)
    else:
        sha256, encoder = manifests.corpus_sha256(path), encoder_of(corpus is not None)
        with store.replacing_folder(folder / out) as work:
            built = dense.build(path, sha256, work, settings, folder / scratch, retrieval.silent, encoder)
            manifest = conf.plain(manifests.write(work, "dense", conf.plain(settings), sha256, built))
    sizes = {name: record["bytes"] for name, record in manifest["files"].items()}
    passages_bytes = sum(sizes.pop(name) for name in ("passages.jsonl", "offsets.npy"))
    sizes = {"index_bytes": sum(sizes.values()), "passages_bytes": passages_bytes}
    return {"passages": manifest["num_passages"], **sizes, **manifest["details"]}


def step_search(folder: Path, corpus: Path | None, kind: str, out: str) -> dict[str, Any]:
    """Search one index in batches of 64 and one by one; queries are encoded before the clock runs."""
    queries = _queries(corpus or folder / WORLD, NUM_QUERIES)
    if kind == "bm25":
        retriever = retrieval.open_retriever(folder / out, verify=False)
    else:
        encoder = Lookup(encoder_of(corpus is not None), queries)
        retriever = dense.open_index(folder / out, manifests.read(folder / out), encoder=encoder)
    retriever.search(queries[:2], TOP_K)
    rates = {}
    for size in (64, 1):
        started, own_started = time.perf_counter(), time.process_time()
        for first in range(0, len(queries), size):
            assert all(len(hits) == TOP_K for hits in retriever.search(queries[first : first + size], TOP_K))
        rates[f"queries_per_s_by_{size}"] = round(len(queries) / (time.perf_counter() - started), 1)
        rates[f"cpu_ms_per_query_by_{size}"] = round(1000 * (time.process_time() - own_started) / len(queries), 3)
    status = Path("/proc/self/status").read_text()
    own = int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]
    return {**rates, "own_gib": round(own * 1024 / GIB, 3)}


def _queries(corpus: Path, count: int) -> list[str]:
    """Titles of passages spread over the file, each with a word that many passages share."""
    size, found = corpus.stat().st_size, []
    with corpus.open("rb") as file:
        for number in range(count):
            file.seek(size * number // (count + 1))
            file.readline()
            found.append(f"Where is {json.loads(file.readline())['title']} located?")
    return found


def run(name: str, *args: str) -> Cost:
    """Run one step in a process of its own."""
    started = time.monotonic()
    process = _start(*args)
    assert process.stdout is not None
    said = process.stdout.read().strip().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name}: exit {process.returncode}")
    seconds, cpu_seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    cost = Cost(name, seconds, cpu_seconds, usage.ru_maxrss * 1024 / GIB, json.loads(said[-1]))
    took = f"{cost.seconds:7.1f} s {cost.cpu_seconds:7.1f} CPU-s  peak {cost.peak_gib:5.2f} GiB"
    print(f"{cost.name:28s} {took}  {json.dumps(cost.said)}", flush=True)
    return cost


def kill_midway(name: str, scratch: Path, pattern: str, half: int, *args: str) -> None:
    """Start a step and kill it when `half` files of that pattern are in its scratch folder."""
    process = _start(*args)
    while process.poll() is None and sum(1 for _ in scratch.glob(pattern)) < half:
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"{name}: ended before it could be killed (exit {process.returncode}).")
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"{name:28s} killed with {sum(1 for _ in scratch.glob(pattern))} files done", flush=True)


def _start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.scale_retrieval", *args]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def same_bytes(one: Path, two: Path) -> bool:
    """Whether two index folders hold the same files; their manifests list sizes and checksums of all others."""
    return (one / manifests.NAME).read_bytes() == (two / manifests.NAME).read_bytes()


def main() -> None:
    """Run every step and say whether the limits hold."""
    parser = argparse.ArgumentParser(description="Scale of retrieval; see the module.")
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="where corpus, scratch and indexes go")
    parser.add_argument("--corpus", type=Path, help="passages of yours, plain JSONL, instead of a world")
    parser.add_argument("--types", default="ivf_sq8", help="dense index types, comma separated; the first is killed")
    parser.add_argument("--most-gib", type=float, default=4.0)
    parser.add_argument("--no-bm25", action="store_true", help="leave bm25 out")
    parser.add_argument("--no-kill", action="store_true", help="build once and undisturbed")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        name, *rest = args.step
        steps = {"corpus": lambda n: step_corpus(args.folder, int(n)),
                 "build": lambda *a: step_build(args.folder, args.corpus, *a),
                 "search": lambda *a: step_search(args.folder, args.corpus, *a)}  # fmt: skip
        print(json.dumps(steps[name](*rest)))
        return
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = ("--corpus", str(args.corpus.resolve())) if args.corpus else ()
    base, same, costs = ("--folder", str(folder), *corpus, "--step"), True, []
    if not corpus and not (folder / WORLD).exists():
        run("corpus", *base, "corpus", str(args.passages))
    first, *others = args.types.split(",")
    for kind in ([] if args.no_bm25 else ["bm25"]) + [first]:
        costs.append(run(f"{kind} build", *base, "build", kind, kind, f"scratch-{kind}"))
        if not args.no_kill:
            chunked = kind == "bm25"
            pattern = "bm25-*/chunk-*.bin" if chunked else "vectors-*/shard-*.npy"
            size = CHUNK_PASSAGES if chunked else settings_of(kind, bool(corpus)).shard_size
            half = max(1, costs[-1].said["passages"] // size // 2)
            again = f"{kind}-killed"
            command = (*base, "build", kind, again, f"scratch-{again}")
            kill_midway(f"{kind} build", folder / f"scratch-{again}", pattern, half, *command)
            run(f"{kind} build resumed", *command)
            equal = same_bytes(folder / kind, folder / again)
            print(f"{kind} build, killed and resumed: {'the same bytes' if equal else 'OTHER BYTES'}", flush=True)
            same = same and equal
            shutil.rmtree(folder / again)
            shutil.rmtree(folder / f"scratch-{again}")
        costs.append(run(f"{kind} search", *base, "search", kind, kind))
    for kind in others:
        costs.append(run(f"{kind} build, no encoding", *base, "build", kind, kind, f"scratch-{first}"))
        costs.append(run(f"{kind} search", *base, "search", kind, kind))
    high = [cost.name for cost in costs if cost.peak_gib > args.most_gib]
    print(f"same bytes after a kill: {same}; above {args.most_gib} GiB: {', '.join(high) or 'none'}")
    raise SystemExit(0 if same and not high else 1)


if __name__ == "__main__":
    main()
