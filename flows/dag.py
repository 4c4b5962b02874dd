"""The graph of stages, read from DVC. Nothing here runs a stage or knows what a stage does."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import psutil
import yaml


@dataclass(frozen=True)
class Dag:
    """The stages of `dvc.yaml` in an order that respects their dependencies.

    Attributes:
        needs: stage name (such as `train@search_r1_grpo-0`) -> the stages it reads from; keys are in that order.
        stale: stages that DVC sees as changed, and all that depend on them; the others need not run.
    """

    needs: dict[str, tuple[str, ...]]
    stale: frozenset[str]

    @property
    def first(self) -> str | None:
        """The only stage without dependencies; its output decides which others are stale. None if there are several."""
        free = [name for name, needs in self.needs.items() if not needs]
        return free[0] if len(free) == 1 else None

    @property
    def urgent_first(self) -> list[str]:
        """All stages, dependencies first; of stages that could start, the one that most others wait for comes first."""
        graph = _graph(self.needs)
        return sorted(self.needs, key=lambda name: -len(networkx.descendants(graph, name)))


def read(root: Path, force: tuple[str, ...] = (), done: Iterable[str] = ()) -> Dag:
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
            graph = repo.index.graph
            stages = {stage.addressing: stage for stage in graph.nodes}
            edges = {name: {other.addressing for other in graph[stage]} for name, stage in stages.items()}
            changed = {name for name, stage in stages.items() if stage.changed()}
    except DvcException as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(f"dvc.yaml: {error}{cause}") from error

    for forced in force:
        named = {name for name in stages if forced in (name, name.partition("@")[0])}
        if not named:
            raise ValueError(f"dvc.yaml: there is no stage {forced!r} to force. Known: {', '.join(sorted(stages))}.")
        changed |= named
    changed -= set(done)

    groups = list(yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"])

    def place(name: str) -> tuple[int, str]:
        return groups.index(name.partition("@")[0]), name

    graph = _graph(edges)
    order = networkx.lexicographical_topological_sort(graph, key=place)
    needs = {name: tuple(sorted(edges[name], key=place)) for name in order}
    stale = changed.union(*(networkx.descendants(graph, name) for name in changed))
    return Dag(needs, frozenset(stale))


def _graph(needs: Mapping[str, Iterable[str]]) -> Any:
    """A graph whose edges point from a stage to those that read from it."""
    graph = networkx.DiGraph((need, name) for name, others in needs.items() for need in others)
    graph.add_nodes_from(needs)
    return graph


def repair(root: Path) -> list[str]:
    """Remove the unfinished files of a killed run; returns one line for each thing that was done.

    The caller must hold the pipeline lock and have found no `working_dvc`. The kernel frees DVC's own lock, but DVC
    writes its list of busy paths and `dvc.lock` in place, so a kill can leave them incomplete, or with the id of a
    process that is now another program.
    """
    done = _repair_busy_paths(root / ".dvc/tmp/rwlock") + _repair_lock_file(root)
    for folder in ("artifacts", "reports"):
        for path in [*(root / folder).glob(".*.*"), *(root / folder).glob("*/.*.*")]:
            if not path.exists():  # It was removed with the unfinished folder that held it.
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            done.append(f"removed the unfinished {path.relative_to(root)}")
    return done


def working_dvc(root: Path) -> int | None:
    """Process id of a living DVC that is at work in this clone, such as a bare `dvc repro`."""
    for info in _holders(root / ".dvc/tmp/rwlock") or []:
        if info["pid"] != os.getpid() and _is_dvc(info["pid"]):
            return int(info["pid"])
    return None


def keep_lock_file(root: Path) -> None:
    """Keep a copy of `dvc.lock` if it is complete, for `repair`; stages that end together may call it at once."""
    if _stages_in(root / "dvc.lock"):
        good = root / ".scratch/dvc.lock"
        good.parent.mkdir(parents=True, exist_ok=True)
        new = good.with_suffix(f".{threading.get_ident()}")
        shutil.copyfile(root / "dvc.lock", new)
        os.replace(new, good)


def _holders(path: Path) -> list[dict[str, int]] | None:
    """Entries of DVC's list of busy paths; None if the file is incomplete."""
    try:
        busy = json.loads(path.read_text(encoding="utf-8"))
        readers = busy.get("read", {}).values()
        infos = [*busy.get("write", {}).values(), *(info for infos in readers for info in infos)]
        return [{"pid": int(info["pid"])} for info in infos]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _repair_busy_paths(path: Path) -> list[str]:
    if _holders(path) == []:
        return []
    path.unlink()
    return ["removed the list of busy paths of a killed run"]


def _repair_lock_file(root: Path) -> list[str]:
    lock, good = root / "dvc.lock", root / ".scratch/dvc.lock"
    if not lock.exists() or _stages_in(lock):
        return []
    if _stages_in(good):
        shutil.copyfile(good, lock)
        return ["replaced the torn dvc.lock by its last good copy"]
    lock.unlink()
    return ["removed the torn dvc.lock"]


def _stages_in(lock: Path) -> dict[str, object]:
    """The stages of a `dvc.lock` that DVC can read; of any other file none."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        tree = yaml.load(lock.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return dict(COMPILED_LOCKFILE_SCHEMA(tree).get("stages", {}))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, Invalid):
        return {}


def _is_dvc(pid: int) -> bool:
    try:
        return any("dvc" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
