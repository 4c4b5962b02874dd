"""The files that belong to the repository: what git tracks. Files that a user adds to a clone turn no test red."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.params import Params

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _tracked() -> frozenset[str] | None:
    """Paths that git tracks; None where there is no repository, such as in a copy that a test made."""
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return frozenset(filter(None, listed.stdout.split("\0")))


def tracked() -> list[str]:
    """Paths of all files of the repository."""
    return sorted(_tracked() or ())


def is_shipped(path: Path) -> bool:
    """Whether a file belongs to the repository; a folder does if a file in it does."""
    known = _tracked()
    name = path.relative_to(ROOT).as_posix()
    return known is None or name in known or (path.is_dir() and any(one.startswith(f"{name}/") for one in known))


def files(folder: str, pattern: str = "*") -> list[Path]:
    """Files of the repository below a folder, in order."""
    found = sorted((ROOT / folder).rglob(pattern))
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts and is_shipped(path)]


def names(kind: str) -> list[str]:
    """Names of the repository's files `conf/<kind>/*.yaml`."""
    return sorted(path.stem for path in files(f"conf/{kind}", "*.yaml"))


@functools.cache
def changed() -> frozenset[str]:
    """Which of the tracked files that a run or its user writes are no longer as they were committed."""
    if _tracked() is None:
        return frozenset()
    show = ["git", "-C", str(ROOT), "diff", "--name-only", "-z", "HEAD", "--", "params.yaml", "dvc.lock", "reports"]
    listed = subprocess.run(show, capture_output=True, text=True, check=True)
    return frozenset(filter(None, listed.stdout.split("\0")))


@functools.cache
def root() -> Path:
    """The repository with `params.yaml` as it was committed last, without what its user has changed since."""
    if "params.yaml" not in changed():
        return ROOT

    show = ["git", "-C", str(ROOT), "show", "HEAD:params.yaml"]
    text = subprocess.run(show, capture_output=True, check=True).stdout
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for path in ROOT.iterdir():
        if path.name != "params.yaml":
            (folder / path.name).symlink_to(path)
    (folder / "params.yaml").write_bytes(text)
    return folder


def settings() -> Params:
    """The settings of the plain run."""
    from tasks import params

    return params.read(root())


def kinds(room: str) -> list[str]:
    """The repository's kinds of a room of `tasks/`, such as `rl.losses`."""
    from tasks import parts

    folder = ROOT.joinpath("tasks", *room.split("."))
    return [kind for kind in parts.kinds(room) if is_shipped(folder / f"{kind}.py")]
