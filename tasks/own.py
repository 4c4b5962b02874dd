"""Parts and settings of one's own, in a folder outside the clone that has the clone's paths.

`PARTS=folder` of a command or `parts: folder` of `params.yaml` names it. `folder/conf/method/mine.yaml` is found like
`conf/method/mine.yaml`, and `folder/tasks/rewards/mine.py` is imported as `tasks.rewards.mine`. A file of the clone is
never replaced: `check` refuses a folder that has one of the same path.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

VARIABLE = "BREADCRUMB_PARTS"
"""The folder for one command, in the place of the one that `params.yaml` names."""
NONE = "conf/parts/none.txt"
"""Stands in `params.yaml` where there is no such folder."""
CLONE = Path(__file__).resolve().parents[1]
"""Root of the clone whose code this process runs."""
_PACKAGE, _CONF = "tasks", "conf"


def named(root: Path = CLONE) -> str | None:
    """The folder of one's own as its user wrote it; None without one."""
    return os.environ.get(VARIABLE) or _named_in(root / "params.yaml")


def folder(root: Path = CLONE) -> Path | None:
    """The folder of one's own that a clone uses now; None without one."""
    written = named(root)
    place = None if not written else (root / written).resolve()
    return place if place is not None and place.is_dir() else None


def shown(name: str) -> str:
    """A path of the package for a message: with the folder of one's own before it, if the file lies there.

    Args:
        name: relative to the clone or to that folder, such as `tasks/rewards/mine.py`.
    """
    mine = folder()
    is_mine = mine is not None and (mine / name).is_file() and not (CLONE / name).is_file()
    return (Path(named() or "") / name).as_posix() if is_mine else name


@contextlib.contextmanager
def using(named: str) -> Iterator[None]:
    """Inside the block this folder is the one that is used, here and in processes that are started."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = named
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def settings(root: Path = CLONE) -> list[Path]:
    """Folders `conf` in which the files of settings lie: the clone's, and one's own."""
    return [place / _CONF for place in (root, folder(root)) if place is not None]


def check(named: str, root: Path = CLONE) -> None:
    """Refuse a folder of parts that would be overlooked, in whole or in part.

    Raises:
        ValueError: it is not there, has no parts, or a file that the clone has, too.
    """
    place, where = root / named, f"parts={named!r} (PARTS=)"
    if named == NONE:
        return
    if place.exists() and place.resolve() == root.resolve():
        raise ValueError(f"{where}: found the clone itself, whose parts are known. Name a folder outside of it.")
    if not place.is_dir():
        what = "a file" if place.exists() else "no such folder"
        raise ValueError(f"{where}: found {what}. Name one that has conf/ and tasks/, such as ../my_parts.")
    mine = _files(place)
    if not mine:
        raise ValueError(
            f"{where}: found neither conf/<kind>/<name>.yaml nor tasks/<room>/<kind>.py in it, expected the paths of "
            "the clone. Write a method as conf/method/<name>.yaml there, and a reward as tasks/rewards/<kind>.py."
        )
    for path in mine:
        if (root / path).exists() or (CLONE / path).exists():
            raise ValueError(f"{where}: {path} is a file of the clone, too. Give yours another name.")
        if not (root / path).parent.is_dir() and path.parts[0] == _CONF:
            known = ", ".join(sorted(one.name for one in (root / _CONF).iterdir() if one.is_dir()))
            raise ValueError(f"{where}: {path.parent} is no folder of settings. Known: {known}.")


def _files(place: Path) -> list[Path]:
    """The files of a folder of parts that are read, relative to it."""
    found = [*(place / _CONF).glob("*/*.yaml"), *(place / _PACKAGE).rglob("*.py")]
    files = sorted(path.relative_to(place) for path in found if path.stem != "__init__")
    return [path for path in files if not any(part.startswith(".") for part in path.parts)]


def install() -> None:
    """Let `import tasks.rewards.mine` find a module of the folder, after all places of the clone."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _named_in(params: Path) -> str | None:
    """The key `parts` of a `params.yaml`; None where it cannot be read, which whoever checks it says."""
    try:
        return _parts_of(params.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=16)
def _parts_of(text: str) -> str | None:
    if "parts" not in text:
        return None
    try:
        import yaml
    except ModuleNotFoundError:  # Set-up runs this package before there is any library.
        return None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    named = tree.get("parts") if isinstance(tree, dict) else None
    return named if isinstance(named, str) and named != NONE else None


class _Loader(importlib.machinery.SourceFileLoader):
    """Leaves no compiled file beside the source: the folder is an input of stage `plan`, and must not change by use."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Write nothing."""


class _Finder(MetaPathFinder):
    """Is asked last for every module that is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module or package of the folder; None without one."""
        place = folder() if fullname.startswith(f"{_PACKAGE}.") else None
        if place is None:
            return None
        base = place.joinpath(*fullname.split("."))
        for file, inside in ((base / "__init__.py", [str(base)]), (base.with_suffix(".py"), None)):
            if file.is_file():
                loader = _Loader(fullname, str(file))
                return importlib.util.spec_from_file_location(  # Loads parts by kind.
                    fullname, file, loader=loader, submodule_search_locations=inside
                )
        return None
