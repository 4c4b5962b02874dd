"""FAISS indexes over unit vectors by inner product: built block by block from shards, searched memory-mapped.

| type | size of a passage | searched vectors |
|---|---|---|
| `flat` | 4 D bytes | every vector, exactly |
| `sq8` | D + 8 bytes | every vector, 8 bits a number |
| `ivf_sq8` | D + 8 bytes | the vectors of the `nprobe` nearest of `nlist` lists, 8 bits a number |
| `ivf_pq` | m bits / 8 + 8 bytes | the same lists, a product code of m parts |
| `hnsw` | 4 D + about 8 M + 20 bytes | a graph, exact scores |

Every type is built by one thread from a fixed sample in a fixed order, so that the files depend on vectors and settings
alone. Lists are filled block by block; each block is kept in scratch, and they are merged on disk. `flat` is streamed.
The graph of `hnsw` and its vectors must fit into memory, and a killed build of it starts from the beginning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.retrieval import Progress, sealed
from tasks.retrieval.encoders import Vectors
from tasks.retrieval.ranking import CANDIDATES
from tasks.retrieval.vectors import Shards
from tasks.store import DataError

Kind = Literal["flat", "hnsw", "ivf_pq", "sq8", "ivf_sq8"]
Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

FLAT, INDEX, LISTS = "vectors.npy", "index.faiss", "lists.ivfdata"

AUTO: tuple[tuple[int, Kind], ...] = ((200_000, "flat"), (500_000, "hnsw"), (30_000_000, "ivf_sq8"))
"""`auto` takes the first type whose number of passages is enough, above the last `ivf_pq` (docs/index-size.md)."""

_BLOCK = 65_536  # Rows in memory at a time. The bytes of an hnsw index depend on it.
_SEED = 0
_PER_CENTROID = 64  # Training passages; FAISS warns below 39.


@dataclass(frozen=True)
class Hnsw:
    """A navigable graph (Malkov and Yashunin).

    Attributes:
        m: links of a passage on each upper layer, twice as many on the lowest.
        ef_construction: candidates looked at for each new passage.
        ef_search: candidates looked at in a search.
    """

    m: Annotated[int, Field(ge=2)] = 32
    ef_construction: PositiveInt = 128
    ef_search: Annotated[int, Field(ge=CANDIDATES)] = 128


@dataclass(frozen=True)
class Ivf:
    """Inverted lists around centroids that k-means found.

    Attributes:
        nlist: lists; 0 takes the power of two nearest to twice the root of the passages (at least 39 passages a list).
        nprobe: lists searched for a query; more where these hold too few passages.
        train_size: most passages that k-means, ranges and product codes are fitted to; fewer where 65,536, or 64 a
            list, are enough.
    """

    nlist: NonNegativeInt = 0
    nprobe: PositiveInt = 64
    train_size: PositiveInt = 262_144


@dataclass(frozen=True)
class Pq:
    """Product codes of `ivf_pq`.

    Attributes:
        m: parts a vector is cut into, a divisor of its length; 0 takes parts of four numbers or a little more.
        bits: bits a part.
    """

    m: NonNegativeInt = 0
    bits: Annotated[int, Field(ge=4, le=12)] = 8


@dataclass(frozen=True)
class Plan:
    """An index type with all its numbers; it is recorded in the manifest."""

    kind: Kind
    parameters: dict[str, int]

    @property
    def of_build(self) -> dict[str, int]:
        """The parameters that change what is built; the others only change how it is searched."""
        return {name: value for name, value in self.parameters.items() if name not in ("nprobe", "ef_search")}


def plan(index: Kind | Literal["auto"], num_rows: int, dimension: int, hnsw: Hnsw, ivf: Ivf, pq: Pq) -> Plan:
    """Choose the numbers that the settings leave open.

    Raises:
        DataError: too few passages for the lists or codes, or a code that does not divide the vectors.
    """
    by_size: Kind = next((name for most, name in AUTO if num_rows <= most), "ivf_pq")
    kind: Kind = by_size if index == "auto" else index
    if kind == "flat":
        return Plan(kind, {})
    if kind == "hnsw":
        return Plan(kind, asdict(hnsw))
    nlist = 1 if kind == "sq8" else ivf.nlist or _lists_for(num_rows)
    sample = min(num_rows, ivf.train_size, max(_PER_CENTROID * nlist, 65_536))
    if nlist > sample:
        raise DataError(f"nlist={nlist}: more lists than the {sample} passages they are fitted to. Give fewer, or 0.")
    parameters = {"nlist": nlist, "nprobe": min(ivf.nprobe, nlist), "train_size": sample}
    if kind == "ivf_pq":
        m = pq.m or max(part for part in range(1, dimension // 4 + 1) if dimension % part == 0)
        if dimension % m:
            raise DataError(f"pq m={m}: does not divide vectors of {dimension} numbers. Give a divisor, or 0.")
        if sample < 1 << pq.bits:
            raise DataError(f"ivf_pq: {sample} passages cannot fit codes of {pq.bits} bits. Choose sq8 or flat.")
        parameters |= {"m": m, "bits": pq.bits}
    return Plan(kind, parameters)


def _lists_for(num_rows: int) -> int:
    most = max(1, num_rows // 39)  # FAISS asks for 39 training vectors a list.
    return min(most, 1 << round(math.log2(2 * math.sqrt(num_rows))))


def build(plan: Plan, shards: Shards, out: Path, scratch: Path, progress: Progress) -> None:
    """Write the index files of `plan` into `out`; `scratch` holds the finished pieces of a killed build."""
    if plan.kind == "flat":
        _write_flat(shards, out / FLAT, progress)
        return
    with threads(1):  # With more threads, sums and links would depend on their timing.
        if plan.kind == "hnsw":
            _write_hnsw(plan, shards, out / INDEX, progress)
        else:
            _write_lists(plan, shards, out, scratch, progress)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let FAISS use so many threads inside the block; the number holds only for the calling thread."""
    faiss = _faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class Index(Protocol):
    """An opened index. If it is `exact` it finds the best rows, else good ones; both return `count` rows."""

    exact: bool

    def search(self, vectors: Vectors, count: int) -> Found:
        """[Q, count] rows and scores for [Q, D] vectors; `count` is at most the number of rows."""
        ...


def open_index(folder: Path, plan: Plan) -> Index:
    """Open what `build` wrote."""
    if plan.kind == "flat":
        return FlatIndex(folder / FLAT)
    return HnswIndex(folder, plan) if plan.kind == "hnsw" else ListIndex(folder, plan)


class FlatIndex:
    """Every vector, memory-mapped, by FAISS's brute-force search."""

    exact = True

    def __init__(self, path: Path) -> None:
        self._vectors = np.load(path, mmap_mode="r", allow_pickle=False)

    def search(self, vectors: Vectors, count: int) -> Found:
        """See `Index`."""
        faiss = _faiss()
        scores, rows = faiss.knn(vectors, self._vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
        return rows, scores


class ListIndex:
    """Inverted lists on disk. A query whose lists hold too few rows is searched again in more of them."""

    exact = False

    def __init__(self, folder: Path, plan: Plan) -> None:
        faiss = _faiss()
        # FAISS then reads the lists from the folder of the index, also after the folder was moved.
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
        self._index = faiss.read_index(str(folder / INDEX), flags)
        self._nlist, self._nprobe = plan.parameters["nlist"], plan.parameters["nprobe"]
        # Reading ahead with 32 threads costs more time than it saves once the lists are in the page cache.
        faiss.downcast_InvertedLists(self._index.invlists).prefetch_nthread = 0

    def search(self, vectors: Vectors, count: int) -> Found:
        """See `Index`."""
        rows, scores = self._probe(vectors, count, self._nprobe)
        nprobe = self._nprobe
        while (short := np.flatnonzero(rows[:, -1] < 0)).size:
            if nprobe == self._nlist:
                raise RuntimeError(f"all {nprobe} lists together gave fewer than {count} rows.")
            nprobe = min(4 * nprobe, self._nlist)
            rows[short], scores[short] = self._probe(vectors[short], count, nprobe)
        return rows, scores

    def _probe(self, vectors: Vectors, count: int, nprobe: int) -> Found:
        faiss = _faiss()
        scores, rows = self._index.search(vectors, count, params=faiss.SearchParametersIVF(nprobe=nprobe))
        return rows, scores


class HnswIndex:
    """A graph. A query that finds too few rows in it, or wants more than `ef_search`, is searched exactly."""

    exact = False

    def __init__(self, folder: Path, plan: Plan) -> None:
        faiss = _faiss()
        self._index = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP_IFC)
        self._ef = plan.parameters["ef_search"]

    def search(self, vectors: Vectors, count: int) -> Found:
        """See `Index`."""
        faiss = _faiss()
        if count > self._ef:
            scores, rows = self._index.storage.search(vectors, count)
            return rows, scores
        scores, rows = self._index.search(vectors, count, params=faiss.SearchParametersHNSW(efSearch=self._ef))
        if (short := np.flatnonzero(rows[:, -1] < 0)).size:
            scores[short], rows[short] = self._index.storage.search(vectors[short], count)
        return rows, scores


def exact_rows(shards: Shards, queries: Vectors, count: int) -> npt.NDArray[np.int64]:
    """[Q, count] the exactly best rows, computed from the shards block by block."""
    faiss = _faiss()
    heap = faiss.ResultHeap(len(queries), count, keep_max=True)
    for first, block in shards.blocks(_BLOCK):
        scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, rows + first)
    heap.finalize()
    best: npt.NDArray[np.int64] = heap.I
    return best


def _write_flat(shards: Shards, path: Path, progress: Progress) -> None:
    with path.open("wb") as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (shards.num_rows, shards.dimension)}
        np.lib.format.write_array_header_1_0(file, shape)
        for number in progress(range(len(shards)), len(shards), "writing vectors"):
            file.write(shards.read(number).astype("<f4", copy=False).data)


def _write_hnsw(plan: Plan, shards: Shards, path: Path, progress: Progress) -> None:
    faiss = _faiss()
    index = faiss.IndexHNSWFlat(shards.dimension, plan.parameters["m"], faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = plan.parameters["ef_construction"]
    for _, block in progress(shards.blocks(_BLOCK), -(-shards.num_rows // _BLOCK), "linking passages"):
        index.add(block)
    faiss.write_index(index, str(path))


def _write_lists(plan: Plan, shards: Shards, out: Path, scratch: Path, progress: Progress) -> None:
    from faiss.contrib.ondisk import merge_ondisk

    faiss = _faiss()
    trained = scratch / "trained.faiss"
    if sealed.state(trained) != "whole":
        sample = np.sort(
            np.random.default_rng(_SEED).choice(shards.num_rows, plan.parameters["train_size"], replace=False)
        )
        sealed.save(trained, faiss.serialize_index(_trained(plan, shards.take(sample))).data)
    blocks = []
    for first, block in progress(shards.blocks(_BLOCK), -(-shards.num_rows // _BLOCK), "filling lists"):
        path = scratch / f"block-{first // _BLOCK:06d}.faiss"
        if sealed.state(path) != "whole":
            filled = faiss.read_index(str(trained))
            filled.add_with_ids(block, np.arange(first, first + len(block), dtype=np.int64))
            sealed.save(path, faiss.serialize_index(filled).data)
        blocks.append(str(path))
    index = faiss.read_index(str(trained))
    merge_ondisk(index, blocks, str(out / LISTS))
    # Without this the file would contain the path where it was built.
    faiss.downcast_InvertedLists(index.invlists).filename = LISTS
    faiss.write_index(index, str(out / INDEX))


def _trained(plan: Plan, sample: Vectors) -> Any:
    faiss = _faiss()
    dimension, metric = sample.shape[1], faiss.METRIC_INNER_PRODUCT
    quantizer, nlist = faiss.IndexFlatIP(dimension), plan.parameters["nlist"]
    if plan.kind == "ivf_pq":
        m, bits = plan.parameters["m"], plan.parameters["bits"]
        index = faiss.IndexIVFPQ(quantizer, dimension, nlist, m, bits, metric)
        # Without this FAISS warns about a small sample, which the settings have chosen.
        index.pq.cp.min_points_per_centroid = 1
        index.pq.cp.max_points_per_centroid = _PER_CENTROID
    else:
        # One list has no centroid worth subtracting: these are the codes of IndexScalarQuantizer.
        eight_bits = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(quantizer, dimension, nlist, eight_bits, metric, nlist > 1)
    index.cp.min_points_per_centroid = 1
    index.train(sample)
    return index


def _faiss() -> Any:
    """The library without types, because its type stubs lack much of what is used here."""
    import faiss

    return faiss
