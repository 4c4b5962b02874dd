"""Names the resume state of a stage by everything that the stage's result depends on, and hashes what it wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasks import conf, store


def fingerprint(root: Path, name: str) -> str:
    """16 hex digits over the content of everything that `dvc.yaml` says stage `name` depends on: plan and artifacts.

    They are read and hashed, so the answer does not rely on the order in which stages ran.

    Raises:
        ValueError: `dvc.yaml` has no such stage, or an input is missing.
    """
    stage, values = _stage(root, name)
    return store.digest({path: _hashes(root / path) for path in (_resolve(dep, values) for dep in stage["deps"])})


def outputs_sha256(root: Path, name: str) -> str | None:
    """Hash of the content of everything that `dvc.yaml` says stage `name` writes; None where something is missing."""
    try:
        stage, values = _stage(root, name)
        paths = [_resolve(out if isinstance(out, str) else next(iter(out)), values) for out in stage["outs"]]
        return store.digest({path: _hashes(root / path) for path in paths})
    except ValueError:
        return None


def _stage(root: Path, name: str) -> tuple[conf.Tree, conf.Tree]:
    """The group of `dvc.yaml` that runs `name`, and the values of its `${...}`."""
    groups = conf.read_yaml(root / "dvc.yaml")["stages"]
    group, _, item = name.partition("@")
    if group not in groups:
        raise ValueError(f"dvc.yaml: there is no stage {group!r} for {name!r}. Known: {', '.join(groups)}.")
    stage = groups[group]
    keys = list(stage.get("matrix", {}))
    parts = item.split("-") if item else []
    if len(keys) != len(parts):
        raise ValueError(f"dvc.yaml: {name!r} has {len(parts)} matrix items, stage {group!r} has {len(keys)}: {keys}.")
    values = conf.read_yaml(root / conf.PARAMS)
    values["item"] = dict(zip(keys, parts, strict=True))
    return stage, values


def _resolve(text: str, values: conf.Tree) -> str:
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(_lookup(values, match[1])), text)


def _lookup(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            raise ValueError(f"dvc.yaml: key {key!r} is not in the settings. Add it to params.yaml or mend dvc.yaml.")
        tree = tree[part]
    return tree


def _hashes(path: Path) -> list[list[str]]:
    """`[relative path, sha256]` of a file, or of every file below a folder."""
    if path.is_file():
        return [[path.name, store.sha256(path)]]
    if not path.is_dir():
        raise ValueError(f"{path}: the stage needs this and it is missing. Run `make run`, which makes it.")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [[str(file.relative_to(path)), store.sha256(file)] for file in files]
