"""Search: `search(queries, top_k)` answered in batches by an index that knows which corpus it was built from.

`build` makes an index folder with the backend the settings name, `open_retriever` opens one and refuses a
folder whose files or corpus are not those of its manifest. This room ranks passages; it never decides what a
policy sees of them, and it never answers an outage with an empty result.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from tasks import conf, parts, store
from tasks.retrieval import manifest as manifests
from tasks.types import Hit

SCRATCH = Path(".scratch/retrieval")
"""Folder of the finished parts of unfinished builds, from which a killed build continues; all stages share it."""
Item = TypeVar("Item")


class RetrievalError(store.OutageError):
    """A search could not be carried out; the rollout counts it as a failure and never as an empty result."""


class QueryError(RetrievalError):
    """The search engine refuses a query of this call. It is up, and may answer the other ones."""


class Retriever(Protocol):
    """The interface of every backend.

    `search` returns one list a query, in the order of the queries, each with exactly
    `min(top_k, passages in the index)` hits, best first, equal scores in corpus order. An empty query is
    valid and also gets that many hits, and so does one whose words no passage has: BM25 gives the first passages of
    the corpus, with score 0. `search([], top_k)` is `[]` and asks nothing of the index.

    Raises:
        ValueError: top_k is below 1 or above the limit of a server (10,000 for Elasticsearch, `max_top_k` for
            `tasks.server`), or a query is not text.
        QueryError: the engine refuses one of the queries, such as one that is too long for it.
        RetrievalError: the search failed.
    """

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query."""
        ...


class Progress(Protocol):
    """Reports how far a loop is."""

    def __call__(self, iterable: Iterable[Item], total: int | None, desc: str) -> Iterable[Item]:
        """The same items; the loop is reported under the name `desc`."""
        ...


def silent(iterable: Iterable[Item], total: int | None, desc: str) -> Iterable[Item]:
    """The `Progress` that shows nothing."""
    return iterable


def load_settings(name: str, root: Path = conf.ROOT) -> Any:
    """Settings of `conf/retriever/<name>.yaml`, as the dataclass of the backend it names.

    Raises:
        ValueError: unknown name, backend or key, or a value out of bounds.
    """
    return settings_of(conf.section("retriever", name, root), f"{conf.CONF}/retriever/{name}.yaml")


def settings_of(tree: Mapping[str, Any], where: str) -> Any:
    """The settings dataclass of the backend that `tree` names; `where` begins every message.

    Raises:
        ValueError: unknown backend or key, or a value out of bounds.
    """
    return conf.fill(_module(tree.get("backend"), where).Settings, tree, where)


def build(
    corpus: Path, out: Path, settings: Any, scratch: Path | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """Index the passages of `corpus` into folder `out`, which appears only when it is complete.

    Args:
        corpus: JSONL (may be `.gz`) of `{id, title, text}` rows.
        out: the index folder; one that is there is replaced.
        settings: what `load_settings` returned.
        scratch: folder where a backend may keep finished parts, so that a killed build continues from them; the name of
            a file is a hash of everything it depends on. None keeps nothing. Builds with the same folder wait for each
            other.
        progress: reports how far long loops are.

    Returns:
        The manifest that was written, as JSON-ready data.

    Raises:
        DataError: a bad row (file, row and field are named) or an empty corpus.
    """
    with _turn(scratch):
        return build_part(corpus, out, settings, scratch, progress)


def build_part(corpus: Path, out: Path, settings: Any, scratch: Path | None, progress: Progress) -> dict[str, Any]:
    """As `build`, for a backend that builds indexes of other backends; `build` holds the lock of `scratch` already."""
    backend = _module(settings.backend, "settings")
    corpus_sha256 = manifests.corpus_sha256(corpus)
    with store.replacing_folder(out) as work:
        built: manifests.Built = backend.build(corpus, corpus_sha256, work, settings, scratch, progress)
        manifest = manifests.write(work, settings.backend, conf.plain(settings), corpus_sha256, built)
    return conf.plain(manifest)  # type: ignore[no-any-return]


def open_retriever(index_dir: Path, corpus: Path | None = None, num_threads: int = 1, verify: bool = True) -> Retriever:
    """Open the index in `index_dir` with the backend its manifest names.

    Args:
        index_dir: a folder made by `build`.
        corpus: when given, must be the corpus the index was built from.
        num_threads: threads of one search; results do not depend on it.
        verify: check every file's checksum; False checks the sizes alone.

    Raises:
        DataError: no index there, a torn or changed file, or another corpus.
    """
    manifest = manifests.read(index_dir)
    manifests.check(index_dir, manifest, corpus, verify)
    if others := manifests.other_versions(manifest):
        told = f"warning: {index_dir}: built with other libraries ({', '.join(others)}): hits may differ. To be sure, "
        print(told + "build the index again.", file=sys.stderr, flush=True)
    backend = _module(manifest.backend, str(index_dir / manifests.NAME))
    retriever: Retriever = backend.open_index(index_dir, manifest, num_threads)
    return retriever


def open_or_build(
    corpus: Path, out: Path, settings: Any, scratch: Path | None = None, progress: Progress = silent
) -> Retriever:
    """Open the index in `out`, built from `corpus` now unless an earlier attempt has done so; see `build`."""
    try:
        return open_retriever(out, corpus)
    except store.DataError:
        print(f"{out.name}: building the index", flush=True)
        build(corpus, out, settings, scratch, progress)
        return open_retriever(out, corpus)


@contextlib.contextmanager
def _turn(scratch: Path | None) -> Iterator[None]:
    if scratch is None:
        yield
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build that uses {scratch}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def search_again(
    retriever: Retriever,
    queries: list[str],
    top_k: int,
    retries: int = 2,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[Hit]]:
    """As `retriever.search`; where that fails, it is repeated `retries` times, after 1, 2, 4, ... seconds.

    Raises:
        QueryError: a query is refused, which would be refused again.
        RetrievalError: the last try failed, too.
    """
    for attempt in range(retries):
        try:
            return retriever.search(queries, top_k)
        except QueryError:
            raise
        except RetrievalError:
            sleep(2.0**attempt)
    return retriever.search(queries, top_k)


def check_request(queries: list[str], top_k: int) -> None:
    """Refuse a request that no backend can answer.

    Raises:
        ValueError: top_k below 1, or a query that is not text.
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: expected at least 1.")
    for index, query in enumerate(queries):
        if not isinstance(query, str):
            raise ValueError(f"queries[{index}]: found {type(query).__name__}, expected text.")


def _backends() -> tuple[str, ...]:
    """Names of the files in this room that define `Settings` and `open_index`: a new backend is listed nowhere."""
    texts = {path.stem: path.read_text("utf-8", errors="replace") for path in parts.modules("retrieval")}
    return tuple(name for name, text in texts.items() if "\nclass Settings" in text and "\ndef open_index(" in text)


def _module(backend: object, where: str) -> ModuleType:
    known = _backends()
    if backend not in known:
        raise ValueError(f"{where}: backend={backend!r}: expected one of {', '.join(known)}.")
    return parts.imported("retrieval", str(backend), where)
