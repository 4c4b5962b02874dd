"""The plan of a stage is a file with everything its result depends on besides the artifacts it reads.

Stage `plan` writes one for each stage and item, `artifacts/plan/<stage>.json` or `artifacts/plan/<stage>/<item>.json`.
DVC runs a stage again when its plan file or an artifact changes; the stage itself reads its settings from there.

How a remote model is reached and what it may cost decides no result. This stands in a second file beside the plan,
`<item>.servers.json`, on which no stage depends: a run whose budget was spent goes on when the budget is raised, and
what was finished stays finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks import conf, identity, store
from tasks.libraries import REQUIREMENTS
from tasks.reached import divided

FOLDER = Path("artifacts/plan")
PROCESSORS = len(os.sched_getaffinity(0))
S = TypeVar("S")


@dataclass(frozen=True)
class Plan:
    """Everything that the result of one stage and item depends on besides artifacts.

    Attributes:
        settings: resolved settings, JSON-ready.
        files: source files the stage may load -> their hashes, see `tasks.identity`.
        libraries: hash of the pinned versions of its libraries, and of those installed in another version.
        extras: files of `requirements/` that have these libraries, besides that of every run.
    """

    settings: dict[str, Any]
    files: dict[str, str]
    libraries: str
    extras: tuple[str, ...] = ()


def path_of(name: str) -> Path:
    """The file of a stage's plan: `train@a-0` -> `artifacts/plan/train/a-0.json`."""
    stage, _, item = name.partition("@")
    return FOLDER / stage / f"{item}.json" if item else FOLDER / f"{stage}.json"


def write(folder: Path, name: str, plan: Plan) -> None:
    """Write the plan of stage `name` into `folder`, which stands for `artifacts/plan`.

    Keys keep their order, because losses and rewards are added up in the order of their keys.
    """
    path = folder / path_of(name).relative_to(FOLDER)
    path.parent.mkdir(parents=True, exist_ok=True)
    decisive, servers = divided(plan.settings)
    _write(path, dataclasses.asdict(dataclasses.replace(plan, settings=decisive)))
    if servers:
        _write(_servers(path), servers)


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def _servers(path: Path) -> Path:
    return path.with_suffix(".servers.json")


def read(root: Path, name: str) -> Plan:
    """The plan of stage `name`.

    Raises:
        ValueError: it is missing or is no plan.
    """
    path = root / path_of(name)
    if not path.is_file():
        raise ValueError(
            f"{path_of(name)}: the stage needs its plan and it is missing. Run `make run`, which makes it."
        )
    plan = conf.fill(Plan, store.read_json(path), str(path_of(name)))
    servers = _servers(path)
    for place, reached in store.read_json(servers).items() if servers.is_file() else ():
        node: Any = plan.settings
        for key in place.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict) or not isinstance(reached, dict):
            raise ValueError(
                f"{_servers(path_of(name))}: {place}: {path_of(name)} has no such settings. Run `make run`, which "
                "plans anew."
            )
        node.update(reached)
    return plan


def threads_of(root: Path, name: str) -> int:
    """Threads of a stage's numeric libraries: the largest `num_threads` in its plan; 1 without plan or such a key.

    A stage that generates with vLLM counts all processors: on a CPU vLLM takes them, whatever it is told.
    """
    path = root / path_of(name)

    def largest(node: Any) -> int:
        if not isinstance(node, dict):
            return 1
        own = PROCESSORS if node.get("kind") == "vllm" else node.get("num_threads")
        return max([own if isinstance(own, int) else 1, *map(largest, node.values())])

    return largest(store.read_json(path)) if path.is_file() else 1


def settings_of(plan: Plan, cls: type[S], name: str) -> S:
    """The settings in a plan, as the dataclass of the stage; what they name is loaded once, so errors name the plan.

    Raises:
        ValueError: the settings do not fit the dataclass, because another version of the code made the plan.
    """
    where = f"{path_of(name)}: settings"
    made = conf.fill(cls, plan.settings, where)
    loads = getattr(sys.modules[cls.__module__], "loads", None)
    try:
        if loads is not None:
            loads(made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return made


def check_sources(plan: Plan, root: Path, name: str) -> None:
    """Refuse a plan that is older than the code or the libraries; the result would be recorded with wrong hashes.

    Raises:
        ValueError: names what has changed.
    """
    sources = identity.Sources(identity.ROOT)
    changed = [path for path, digits in plan.files.items() if sources.changed(path, digits)]
    if plan.libraries != store.digest(identity.libraries(root, plan.extras)):
        changed.append(str(REQUIREMENTS))
    if changed:
        raise ValueError(
            f"{path_of(name)}: {', '.join(changed)} changed after the plan was made. Run `make run`, which plans anew."
        )


def check_item(plan: Plan, name: str, item: Mapping[str, str]) -> None:
    """Refuse a plan that was made for another item: the stage would write the result of that one.

    Args:
        plan: the plan of stage `name`.
        name: stage and matrix item.
        item: key -> value, as the command line of the stage has them.

    Raises:
        ValueError: names the key.
    """
    for key, value in item.items():
        found = plan.settings.get(key)
        if str(found) != value:
            raise ValueError(
                f"{path_of(name)}: settings: {key}={conf.shown(found)}: expected {value}, as on the stage's command "
                "line. Run `make run`, which plans anew."
            )


@contextlib.contextmanager
def only_listed(plan: Plan | None, name: str) -> Iterator[None]:
    """Inside the block, importing a module that the plan does not list is an error; None lets everything in.

    A change of its file would go unnoticed. The stage ends before it puts a result in place.

    Raises:
        ValueError: names the file; also of a module that was imported before the block.
    """
    if plan is None:
        yield
        return
    guard = _Guard(plan, name)
    for path in sorted(identity.loaded()):
        guard.check(path)
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


class _Guard(importlib.abc.MetaPathFinder):
    """Is asked first for every module that is imported, and finds none."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        self._sources = identity.Sources(identity.ROOT)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise the ValueError for a module of this package that the plan does not list."""
        if fullname.partition(".")[0] == identity.PACKAGE:
            for file in self._sources.files_of(fullname):
                self.check(self._sources.name_of(file))

    def check(self, path: str) -> None:
        """Raise the ValueError for a file that the plan does not list, unless it is one of the frame."""
        if path not in self._plan.files and not path.startswith(identity.FRAME):
            raise ValueError(
                f"{path_of(self._name)}: the stage loads {path}, which is not among `files`. Run `make run`, which "
                "plans anew. If this remains: a module that is loaded by kind must be that of a dataclass in the "
                "stage's settings or in what its `loads` gives."
            )
