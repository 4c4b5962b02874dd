"""Models that the pipeline trains for services: ordinary model folders, each sealed by a manifest of its files' hashes.

A stage that uses such a model gets its folder and the hash of its manifest, and the loader compares both: a model that
was exchanged in between would give other scores under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.store import DataError, read_json, sha256, write_json

FOLDER = Path("artifacts/models")
MANIFEST, MODELS = "manifest.json", "models.json"


@dataclass(frozen=True)
class Trained:
    """One model.

    Attributes:
        folder: relative to the root of the clone.
        sha256: of its manifest.
    """

    folder: str
    sha256: str

    def checked(self, root: Path) -> Path:
        """The folder, after a comparison of every file with its hash.

        Raises:
            DataError: the manifest or a file is missing or differs.
        """
        folder = root / self.folder
        found = sha256(folder / MANIFEST) if (folder / MANIFEST).is_file() else "no file"
        if found != self.sha256:
            raise DataError(
                f"{self.folder}/{MANIFEST}: found {found}, expected sha256 {self.sha256}: another model than the one "
                "that was planned for. Run `make run`, which trains it anew where it is missing."
            )
        for name, digits in files_of(folder).items():
            if not (folder / name).is_file() or sha256(folder / name) != digits:
                raise DataError(
                    f"{self.folder}/{name}: missing, or another file than {MANIFEST} names. Remove the folder and run "
                    "`make run`, which trains the model again."
                )
        return folder


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a finished model folder: the hash of every file in it, and facts about its making."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: sha256(folder / name) for name in names if name != MANIFEST}
    write_json(folder / MANIFEST, {**facts, "files": files})


def files_of(folder: Path) -> dict[str, str]:
    """File -> hash, as the manifest of a model folder lists them.

    Raises:
        DataError: there is no manifest, or it lists no files.
    """
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise DataError(
            f"{folder / MANIFEST}: found no list of files, expected the hash of each. Train the model again."
        )
    return files


def find(root: Path, names: Iterable[str], seed: int) -> dict[str, Trained]:
    """The trained models of one seed, by name.

    Raises:
        DataError: one is missing.
    """
    found = {}
    for name in names:
        folder = FOLDER / f"{name}-{seed}"
        if not (root / folder / MANIFEST).is_file():
            raise DataError(f"{folder / MANIFEST}: the file is missing. Run `make run`, which trains the model.")
        found[name] = Trained(str(folder), sha256(root / folder / MANIFEST))
    return found


def write(folder: Path, models: Mapping[str, Trained]) -> None:
    """Write `models.json`; `read` inverts it."""
    write_json(folder / MODELS, {name: conf.plain(model) for name, model in models.items()})


def read(folder: Path) -> dict[str, Trained]:
    """The models that `folder` names; none where it has no `models.json`.

    Raises:
        DataError: the file cannot be read.
        ValueError: an entry is not a folder with a hash.
    """
    path = folder / MODELS
    if not path.is_file():
        return {}
    return {name: conf.fill(Trained, entry, f"{path}: {name}") for name, entry in read_json(path).items()}
