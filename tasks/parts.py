"""Finds parts by room and kind: kind `answer` of room `rewards` is the `PART` of `tasks/rewards/answer.py`.

`PART` is the frozen dataclass that holds the part's numbers and their bounds. There is no registry and no list of
kinds: a new file is a new kind. A part is imported only if settings name it, so that a change of its file makes only
those stages run again that use it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks import conf

KIND = "kind"
_TASKS = Path(__file__).parent
_PART = re.compile(r"^PART\b", re.MULTILINE)


def kinds(room: str) -> list[str]:
    """The kinds of a room, such as `rewards` or `rl.losses`: its files that define `PART`. It imports none of them."""
    files = conf.modules(_TASKS.joinpath(*room.split(".")))
    return [path.stem for path in files if _PART.search(path.read_text(encoding="utf-8"))]


def make(room: str, tree: Mapping[str, Any], where: str) -> Any:
    """Build the part that settings describe.

    Args:
        room: folder of the part's file below `tasks`, with dots.
        tree: `kind`, which names the file, and the fields of its dataclass.
        where: file and key of the settings, for messages.

    Raises:
        ValueError: no mapping, no kind, an unknown or a broken one, or numbers that its dataclass refuses.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get(KIND), str):
        raise ValueError(f"{where}: found {tree!r}, expected a mapping with key 'kind'. {conf.known(kinds(room))}")
    numbers = {key: value for key, value in tree.items() if key != KIND}
    return conf.fill(_module(room, tree[KIND], where).PART, numbers, where)


def make_if(room: str, tree: Mapping[str, Any] | None, where: str) -> Any:
    """As `make`; None, a part that is not used, stays None."""
    return None if tree is None else make(room, tree, where)


def make_each(room: str, trees: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """Build the part of each kind, in order; a kind whose numbers are null is left out.

    Raises:
        ValueError: as `make`.
    """
    if not isinstance(trees, Mapping):
        raise ValueError(f"{where}: found {trees!r}, expected a mapping of kind to numbers.")
    built = []
    for kind, numbers in trees.items():
        module = _module(room, kind, where)
        if numbers is not None:
            built.append(conf.fill(module.PART, numbers, f"{where}: {kind}"))
    return tuple(built)


def kind_of(part: object) -> str:
    """The kind of a part, which is the name of its file."""
    return type(part).__module__.rpartition(".")[2]


def plain(part: object) -> dict[str, Any]:
    """Settings from which `make` builds an equal part, ready for JSON, with every field."""
    return {KIND: kind_of(part), **conf.plain(part)}


def _module(room: str, kind: object, where: str) -> ModuleType:
    known = kinds(room)
    if kind not in known:
        folder = "/".join(["tasks", *room.split(".")])
        raise ValueError(f"{where}: unknown kind {kind!r}: {folder}/ has no such part. {conf.known(known)}")
    file = f"tasks/{room.replace('.', '/')}/{kind}.py"
    try:
        module = importlib.import_module(f"tasks.{room}.{kind}")  # Loads parts by kind.
    except Exception as error:
        raise ValueError(f"{where}: {kind}: {file} cannot be loaded: {_cause(error)}. Mend that file.") from error
    part = getattr(module, "PART", None)
    if not (isinstance(part, type) and dataclasses.is_dataclass(part)):
        raise ValueError(
            f"{where}: {kind}: {file}: PART={conf.shown(part)}: expected a frozen dataclass. End the file with `PART = "
            "<its dataclass>`."
        )
    return module


def _cause(error: Exception) -> str:
    """Kind and text of an error, and the line of this package where it arose; a syntax error says that itself."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frames = (frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(_TASKS)))
    *_, last = frames
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
