"""Finds the policy that a command names, and how it plays: one definition for every command that lets a policy play.

A policy is named as the folders of `artifacts/train/` are, such as `search_r1_grpo-0`, or `base-0` for the start
policy; or by the path of such a folder, of this clone or another. A trained policy plays with the prompt, grammar and
budgets that it was trained with, the start policy with those of its evaluation.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from tasks import conf, parts, planned, store, systems
from tasks.agent import grammars
from tasks.model import Dtype
from tasks.model_files import require_weights
from tasks.records import systems as records
from tasks.retrieval import manifest as manifests
from tasks.store import DataError

FOLDER = Path("artifacts/train")
SUMMARY = "summary.json"
_MODEL = "policy"


@dataclass(frozen=True)
class _Computed:
    dtype: Dtype
    num_threads: PositiveInt = 1


@dataclass(frozen=True)
class Policy:
    """A policy that can play.

    Attributes:
        name: of its folder, such as `search_r1_grpo-0`.
        weights: folder of the model.
        where: the file that says how it plays, for messages.
        playing: kind and settings of the system that plays it.
        dtype, num_threads: what it was evaluated in.
        sha256: of its weights as trained; None where nothing says so.
        index_sha256, corpus_sha256: of the index that it has learned to search; None where nothing says that.
    """

    name: str
    weights: Path
    where: str
    playing: dict[str, Any]
    dtype: Dtype
    num_threads: int
    sha256: str | None = None
    index_sha256: str | None = None
    corpus_sha256: str | None = None

    def checked_weights(self) -> Path:
        """The folder of the model, whose weights are those that were trained.

        Raises:
            DataError: they are not.
        """
        require_weights(self.weights, self.sha256)
        return self.weights

    def require_index(self, index: Path, is_another: bool = False) -> None:
        """Refuse an index that is not the one that the policy has learned to search.

        Args:
            index: folder of the index that it would search.
            is_another: whether another index of the same passages was asked for.

        Raises:
            DataError: it is another one; there is no index.
        """
        manifest = manifests.read(index)
        found, passages = store.sha256(index / manifests.NAME), manifest.corpus_sha256
        is_same = passages == self.corpus_sha256 if is_another else found == self.index_sha256
        if self.index_sha256 is None or is_same:
            return

        has_passages = passages == self.corpus_sha256
        helps = (
            "Make its own with the settings it was trained with (`make run`), or name RETRIEVER= for another search "
            "engine over the same passages"
            if has_passages
            else "A run with other settings, such as `make smoke`, has replaced its index: repeat the run that trained "
            "the policy (`make run`), or name its index with INDEX=<folder>"
        )
        raise DataError(
            f"{index}: found index {found[:12]} ({manifest.backend}, {manifest.num_passages} passages, corpus "
            f"{passages[:12]}), expected {self.index_sha256[:12]} (corpus {str(self.corpus_sha256)[:12]}), over which "
            f"policy {self.name} was trained. {helps}. ARGS=--any-index plays it over this one."
        )

    def kind(self) -> systems.Kind:
        """The system that plays it.

        Raises:
            ValueError: settings of another version of the code.
        """
        made: systems.Kind = parts.make("systems", self.playing, self.where)
        return made

    def require_evidence(self) -> None:
        """Refuse a policy that writes no evidence.

        Raises:
            DataError: its grammar has none.
        """
        grammar = grammars.make(self.playing["grammar"], None, f"{self.where}: grammar")
        if not grammar.shows_evidence:
            raise DataError(
                f"{self.where}: grammar {parts.kind_of(grammar)!r}: this policy writes no evidence. Expected one that "
                "was trained with R-Search's grammar, such as artifacts/train/r_search-0."
            )


def find(named: str | Path, root: Path = conf.ROOT) -> Policy:
    """The policy of a name or of a folder.

    Args:
        named: a folder, or a name of `artifacts/train/`.
        root: of the clone.

    Raises:
        DataError: there is no such policy, or what is there plays none.
    """
    text, folder = str(named), Path(named)
    if not text or (not folder.is_dir() and (os.sep not in text or folder.parent == FOLDER)):
        name = _name_known(folder.name, root)
        return _described(root / FOLDER / name, name)
    return _described(folder, folder.resolve().name)


def _name_known(name: str, root: Path) -> str:
    known = names(root)
    if not known:
        raise DataError(
            f"POLICY={conf.shown(name)}: nothing is trained yet, {FOLDER} has no policy. Train with `make run`, or "
            "with `make smoke` at the smallest size."
        )
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise DataError(f"POLICY={conf.shown(name)}: there is no such policy.{hint} {conf.known(known)}")
    return name


def names(root: Path) -> list[str]:
    """The policies that a run has left in `artifacts/train/`, in the order of their names."""
    folder = root / FOLDER
    files = (records.FILE, SUMMARY)
    found = (
        [one for one in folder.iterdir() if any((one / file).is_file() for file in files)] if folder.is_dir() else []
    )
    return sorted(one.name for one in found if _has_weights(one))


def _has_weights(folder: Path) -> bool:
    return (folder / SUMMARY).is_file() or records.read(folder).policy is not None


def _described(folder: Path, name: str) -> Policy:
    if (folder / SUMMARY).is_file():
        return _trained(folder, name)
    if not (folder / records.FILE).is_file():
        inside = (folder.parent / SUMMARY).is_file()
        hint = f"Name {folder.parent}, the folder above" if inside else "Make one with `make run`"
        raise DataError(
            f"{folder / SUMMARY}: the file is missing. Expected a folder that a run has trained, such as "
            f"artifacts/train/search_r1_grpo-0. {hint}."
        )
    return _untrained(folder, name)


def _trained(folder: Path, name: str) -> Policy:
    """A policy of training, whose summary says how it plays."""
    path = folder / SUMMARY
    summary = _mapping(store.read_json(path), path)
    settings = _mapping(summary.get("settings"), path)
    method, train = _mapping(settings.get("method"), path), _mapping(settings.get("train"), path)
    playing = {key: method.get(key) for key in ("prompt", "grammar")} | {"rollout": settings.get("rollout")}
    where = f"{path}: settings"
    computed = _computed(train, where)
    kind = {parts.KIND: "policy", **playing}
    weights, known = folder / _MODEL, summary.get("policy_sha256")
    return Policy(name, weights, where, kind, computed.dtype, computed.num_threads, known, *_taught_with(folder))


def _taught_with(folder: Path) -> tuple[str | None, str | None]:
    """Hashes of index and corpus, as the stage that made the policy has written them beside it."""
    path = folder / records.FILE
    found = store.read_json(path) if path.is_file() else {}
    return found.get("index_sha256"), found.get("corpus_sha256")


def _computed(settings: Mapping[str, Any], where: str) -> _Computed:
    known = ("dtype", "num_threads")
    return conf.fill(_Computed, {key: settings[key] for key in known if key in settings}, where)


def _mapping(found: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise DataError(
            f"{path}: found no settings of a training, expected `settings` with `method`, `rollout` and `train`. "
            "Train the policy again."
        )
    return found


def _untrained(folder: Path, name: str) -> Policy:
    """A start policy. Its folder names its weights, and the plan of its evaluation says how it plays."""
    record = records.read(folder)
    if record.policy is None:
        raise DataError(f"{folder}: {record.name!r} plays no policy, it asks a server. Name a trained policy.")
    above = folder.resolve().parents
    if len(above) <= len(FOLDER.parts):
        raise DataError(
            f"{folder}: found a start policy outside a clone, expected it in {FOLDER} of one. Name it there."
        )
    root, stage = above[len(FOLDER.parts)], f"evaluate@{name}"
    if not (root / planned.path_of(stage)).is_file():
        raise DataError(
            f"{root / planned.path_of(stage)}: the file is missing, so nothing says how {name!r} plays: it was not "
            "among the systems of the last run. Run once more with it, or name a trained policy."
        )
    settings = planned.read(root, stage).settings
    playing = settings.get("playing")
    where = f"{planned.path_of(stage)}: settings: playing"
    if not isinstance(playing, Mapping):
        raise DataError(f"{where}: found none. Run `make run`, which plans anew.")
    # The services of a policy are none: only prompted systems call any.
    called = {key: value for key, value in playing.items() if key != "services"}
    computed = _computed(settings, str(planned.path_of(stage)))
    known = record.policy_sha256, record.index_sha256, record.corpus_sha256
    return Policy(name, root / record.policy, where, called, computed.dtype, computed.num_threads, *known)
