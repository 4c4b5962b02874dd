"""The graph of stages, read from DVC, and what a killed run or a bad disk has left of DVC's files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx
import psutil
import yaml

LOCK = Path("dvc.lock")
MOST_READ = 64 << 20
"""Bytes of the largest output whose hash is compared before a run."""
BUSY = Path(".dvc/tmp/rwlock")
"""DVC's list of the paths that its processes read and write."""


@dataclass(frozen=True)
class Dag:
    """The stages of `dvc.yaml`.

    Attributes:
        needs: stage name (such as `train@search_r1_grpo-0`) -> the stages it reads from. Keys are in an order in which
            they can run; of those that could start, the one that most others wait for comes first.
        stale: stages that DVC sees as changed, and all that depend on them; the others need not run.
        outs: stage name -> the paths that it writes, relative to the root.
    """

    needs: dict[str, frozenset[str]]
    stale: frozenset[str]
    outs: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read(root: Path, force: Iterable[str] = (), done: Iterable[str] = ()) -> Dag:
    """Ask DVC for the graph and for what has changed.

    Args:
        root: root of the clone.
        force: groups (`evaluate`) or stages (`evaluate@base-0`) to count as changed.
        done: stages that ran just now and count as unchanged, forced or not.

    Raises:
        ValueError: `dvc.yaml` or `params.yaml` cannot be read, or `force` names nothing.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root), _wait_for_lock=True) as repo, repo.lock:
            for stage in repo.index.graph if not done else ():  # Once a run: every byte is read.
                _show_damage(stage)
            graph = networkx.relabel_nodes(repo.index.graph, lambda stage: stage.addressing).reverse()
            changed = {stage.addressing for stage in repo.index.graph if stage.changed()}
            outs = {stage.addressing: tuple(out.def_path for out in stage.outs) for stage in repo.index.graph}
    except DvcException as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(f"dvc.yaml: {error}{cause}") from error

    for one in force:
        named = {name for name in graph if is_named(name, one)}
        if not named:
            raise ValueError(f"dvc.yaml: there is no stage {one!r} to force. Known: {', '.join(sorted(graph))}.")
        changed |= named
    changed -= set(done)
    stale = changed.union(*(networkx.descendants(graph, name) for name in changed))
    return Dag(ordered(graph), frozenset(stale), outs)


def _show_damage(stage: Any) -> None:
    """Let DVC see outputs whose bytes are not those that `dvc.lock` names: it looks at size and time alone.

    Large files are not read here. They are weights, which are hashed when they are loaded.
    """
    for out in stage.outs:
        if not out.hash_info or not out.exists:
            continue
        for path, digest in _files(out):
            if path.is_file() and path.stat().st_size <= MOST_READ and _md5(path) != digest.removesuffix(".dir"):
                os.utime(path)


def is_named(name: str, one: str) -> bool:
    """Whether `one` is this stage or its group."""
    return one in (name, name.partition("@")[0])


def ordered(graph: Any) -> dict[str, frozenset[str]]:
    """The `needs` of a graph whose edges point from a stage to those that read from it."""
    waiting = {name: len(networkx.descendants(graph, name)) for name in graph}
    order = networkx.lexicographical_topological_sort(graph, key=lambda name: (-waiting[name], name))
    return {name: frozenset(graph.predecessors(name)) for name in order}


def working_dvc(root: Path) -> int | None:
    """Process id of a living DVC that is at work in this clone, such as a bare `dvc repro`."""
    busy = root / BUSY
    for pid in re.findall(r'"pid": (\d+)', busy.read_text(encoding="utf-8") if busy.is_file() else ""):
        with contextlib.suppress(psutil.Error):
            if int(pid) != os.getpid() and any("dvc" in word for word in psutil.Process(int(pid)).cmdline()):
                return int(pid)
    return None


def bring_back(root: Path, outs: Collection[str]) -> list[str]:
    """Take outputs that are not there from DVC's cache, if it has them; returns those that it had.

    DVC removes the outputs of a stage before it starts it, so one that is refused because a run is at work leaves none.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    with contextlib.suppress(DvcException), Repo(str(root), _wait_for_lock=True) as repo:
        repo.checkout(targets=[str(root.resolve() / out) for out in outs], allow_missing=True)
    return [out for out in outs if (root / out).exists()]


def repair(root: Path) -> list[str]:
    """Remove the unfinished files of a killed run; returns one line for each that may be missed.

    The caller must hold the pipeline lock and have found no `working_dvc`. The kernel frees DVC's own lock, but DVC
    writes its list of busy paths and `dvc.lock` in place, so a kill can leave them incomplete, or with the id of a
    process that is now another program. Without `dvc.lock` DVC finds finished results in its cache, by their inputs.
    """
    (root / BUSY).unlink(missing_ok=True)
    done = []
    if (root / LOCK).exists() and not _is_whole(root / LOCK):
        (root / LOCK).unlink()
        done.append("removed the torn dvc.lock")
    for folder in ("artifacts", "reports"):
        for path in [*(root / folder).glob(".*.*"), *(root / folder).glob("*/.*.*")]:
            if path.exists():  # Not if it went with the unfinished folder that held it.
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                done.append(f"removed the unfinished {path.relative_to(root)}")
    return done


def _is_whole(lock: Path) -> bool:
    """Whether DVC can read this `dvc.lock`."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        tree = yaml.load(lock.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return bool(COMPILED_LOCKFILE_SCHEMA(tree))
    except (ValueError, RecursionError, yaml.YAMLError, Invalid):
        return False


def remove_damaged(root: Path, name: str) -> list[str]:
    """Remove outputs whose bytes are not those that `dvc.lock` names, with the damaged files of the cache.

    DVC copies a file of its cache without reading it, as long as it is write-protected: a disk that loses bits would
    change a published number in silence. The stage then has to run again, for neither its output nor a copy is there.

    Returns:
        The outputs of stage `name` that were removed, relative to `root`.
    """
    from dvc.repo import Repo

    removed = []
    with Repo(str(root), _wait_for_lock=True) as repo:
        with repo.lock:  # DVC writes `dvc.lock` in place, for another stage that ends at this moment.
            outs = [out for out in repo.stage.get_target(name).outs if out.use_cache]  # Git keeps the others.
        for out in outs:
            damaged = [digest for path, digest in _files(out) if _md5(path) != digest.removesuffix(".dir")]
            for digest in damaged:
                Path(out.cache.oid_to_path(digest)).unlink(missing_ok=True)
            if damaged:
                out.remove()
                removed.append(Path(out.fs_path).relative_to(root.resolve()).as_posix())
    return removed


def _files(out: Any) -> Iterator[tuple[Path, str]]:
    """Every file of an output with the hash that it must have, the list of a folder's files included."""
    path, digest = Path(out.fs_path), out.hash_info.value
    yield Path(out.cache.oid_to_path(digest)) if out.hash_info.isdir else path, digest
    for parts, _, file in (out.get_obj() or ()) if out.hash_info.isdir else ():
        yield path.joinpath(*parts), file.value


def _md5(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
