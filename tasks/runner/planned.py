"""The plan of a stage is a file with everything its result depends on besides the artifacts it reads.

Stage `plan` writes one for each stage and item, `artifacts/plan/<stage>.json` or `artifacts/plan/<stage>/<item>.json`.
DVC runs a stage again when its plan file or an artifact changes; the stage itself reads its settings from there.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks import conf, identity, store

FOLDER = Path("artifacts/plan")
S = TypeVar("S")


@dataclass(frozen=True)
class Plan:
    """Everything that the result of one stage and item depends on besides artifacts.

    Attributes:
        settings: resolved settings, JSON-ready.
        files: source files the stage may load -> their hashes, see `tasks.identity`.
        libraries: hash of the pinned versions of all libraries, and of those installed in another version.
    """

    settings: dict[str, Any]
    files: dict[str, str]
    libraries: str


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
    text = json.dumps(dataclasses.asdict(plan), ensure_ascii=False, allow_nan=False, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


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
    return conf.fill(Plan, store.read_json(path), str(path_of(name)))


def settings_of(plan: Plan, cls: type[S], name: str) -> S:
    """The settings in a plan, as the dataclass of the stage.

    Raises:
        ValueError: the settings do not fit the dataclass, because another version of the code made the plan.
    """
    return conf.fill(cls, plan.settings, f"{path_of(name)}: settings")


def check_sources(plan: Plan, root: Path, name: str) -> None:
    """Refuse a plan that is older than the code or the libraries; the result would be recorded with wrong hashes.

    Raises:
        ValueError: names what has changed.
    """
    sources = identity.Sources(identity.ROOT)
    changed = [path for path, digits in plan.files.items() if sources.changed(path, digits)]
    if plan.libraries != store.digest(identity.libraries(root)):
        changed.append(str(identity.REQUIREMENTS))
    if changed:
        raise ValueError(
            f"{path_of(name)}: {', '.join(changed)} changed after the plan was made. Run `make run`, which plans anew."
        )


def check_loaded(plan: Plan, name: str) -> None:
    """Refuse a plan that does not list a file this process has loaded; a change of that file would go unnoticed.

    Raises:
        AssertionError: names the files.
    """
    missing = sorted(identity.loaded() - plan.files.keys())
    assert not missing, (
        f"{path_of(name)}: the stage loaded {', '.join(missing)}, and its plan does not list them. A module that is "
        f"loaded by kind must be that of a dataclass in the stage's settings or in what its `loads` gives."
    )
