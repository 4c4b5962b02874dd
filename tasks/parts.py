"""Finds parts by room and kind: kind `answer` of room `rewards` is the `PART` of `tasks/rewards/answer.py`.

The file lies in the clone or in a folder of one's own (`tasks.own`). `PART` is the frozen dataclass that holds the
part's numbers and their bounds. There is no registry and no list of kinds: a new file is a new kind. A part is imported
only if settings name it, so that a change of its file makes only those stages run again that use it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks import conf, own

KIND = "kind"
_TASKS = Path(__file__).parent
_PART = re.compile(r"^PART\b", re.MULTILINE)


def kinds(room: str) -> list[str]:
    """The kinds of a room, such as `rewards` or `rl.losses`: its files that define `PART`. It imports none of them."""
    return sorted(path.stem for path in modules(room) if _PART.search(path.read_text("utf-8", errors="replace")))


def modules(room: str) -> list[Path]:
    """The Python files of a room that can be imported, one's own included."""
    places = [_TASKS] if (mine := own.folder()) is None else [_TASKS, mine / _TASKS.name]
    return [path for place in places for path in conf.modules(place.joinpath(*room.split(".")))]


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
    return _filled(_module(room, tree[KIND], where), numbers, where)


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
            built.append(_filled(module, numbers, f"{where}: {kind}"))
    return tuple(built)


def kind_of(part: object) -> str:
    """The kind of a part, which is the name of its file."""
    return type(part).__module__.rpartition(".")[2]


def plain(part: object) -> dict[str, Any]:
    """Settings from which `make` builds an equal part, ready for JSON, with every field."""
    return {KIND: kind_of(part), **conf.plain(part)}


def check_members(part: object, protocol: type, where: str) -> None:
    """Refuse a part that lacks a member of its room's protocol, or whose methods take other arguments.

    The methods that it gives to a base class of its own are held against that class.

    Raises:
        ValueError: names the file, the line and what was expected.
    """
    for name in _members(protocol):
        if not hasattr(part, name):
            raise ValueError(
                f"{where}: {kind_of(part)}: {_line_of(type(part))}: {type(part).__name__} has no {name}, which "
                f"{protocol.__name__} of {file_of(protocol)} describes. Add it."
            )
    methods = {name: one for name, one in vars(type(part)).items() if name == "__call__" or not name.startswith("_")}
    for name, function in methods.items():
        given_by = [base for base in (*type(part).__mro__[1:], protocol) if inspect.isfunction(vars(base).get(name))]
        if given_by and inspect.isfunction(function):
            _check_arguments(function, vars(given_by[0])[name], f"{where}: {kind_of(part)}")


def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if name == "__call__" or not name.startswith("_")]


def _check_arguments(function: Callable[..., Any], pattern: Callable[..., Any], where: str) -> None:
    """Raise the ValueError for a method that cannot be called like the one it stands for."""
    given = inspect.signature(pattern).parameters.values()
    positional = [one.name for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = [one.name for one in given if one.kind == one.KEYWORD_ONLY]
    found = inspect.signature(function)
    try:
        found.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        names = [f"{function.__name__}({', '.join(one.parameters)})" for one in (found, inspect.signature(pattern))]
        place = f"{own.shown(_name(function.__code__.co_filename))}, line {function.__code__.co_firstlineno}"
        raise ValueError(f"{where}: {place}: found {names[0]}, expected {names[1]}.") from None


def arose_in(error: BaseException, cls: type) -> bool:
    """Whether an error was raised by the file of this class itself, and not by what it called."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return _name(last.filename) == _name(_source(cls))


def place_of(error: BaseException, cls: type) -> str:
    """File and line at which the code of a class broke off, such as `tasks/rewards/mine.py, line 12`.

    Where its file called other code that broke off, it is the line of the call; without any, that of the class.
    """
    source = _name(_source(cls))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _name(frame.filename) == source]
    return f"{file_of(cls)}, line {frames[-1].lineno}" if frames else _line_of(cls)


def _filled(module: ModuleType, numbers: Any, where: str) -> Any:
    """The part with its numbers; an error of its own code names the line."""
    try:
        return conf.fill(module.PART, numbers, where)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error, module.PART)
        raise ValueError(f"{where}: {place}: cannot be made: {type(error).__name__}: {error}. Mend it.") from error


def _module(room: str, kind: object, where: str) -> ModuleType:
    known = kinds(room)
    folder = "/".join(["tasks", *room.split(".")])
    if kind not in known:
        mine = "" if own.folder() is None else f" (nor has {own.named()}/{folder}/)"
        told = f"{folder}/ has no such part{mine}.{conf.did_you_mean(str(kind), known)} {conf.known(known)}"
        if any(path.stem == kind for path in modules(room)):
            file = own.shown(f"{folder}/{kind}.py")
            told = f"{file} has no PART. End the file with `PART = <its dataclass>`. {conf.known(known)}"
        raise ValueError(f"{where}: unknown kind {kind!r}: {told}")
    file = own.shown(f"{folder}/{kind}.py")
    module = imported(room, str(kind), where)
    part = getattr(module, "PART", None)
    if not (isinstance(part, type) and dataclasses.is_dataclass(part)):
        raise ValueError(
            f"{where}: {kind}: {file}: PART={conf.shown(part)}: expected a frozen dataclass. End the file with `PART = "
            "<its dataclass>`."
        )
    return module


def imported(room: str, kind: str, where: str) -> ModuleType:
    """The module of a kind that is there.

    Raises:
        ValueError: its code cannot be run; names the file and the line.
    """
    try:
        return importlib.import_module(f"tasks.{room}.{kind}")  # Loads parts by kind.
    except (Exception, SystemExit) as error:
        file = own.shown(f"tasks/{room.replace('.', '/')}/{kind}.py")
        raise ValueError(f"{where}: {kind}: {file} cannot be loaded: {_cause(error)}. Mend that file.") from error


def _cause(error: BaseException) -> str:
    """Kind and text of an error, and the line of the package where it arose; a syntax error says that itself."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _name(frame.filename) != frame.filename]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _places() -> Iterator[Path]:
    yield _TASKS.parent
    if (mine := own.folder()) is not None:
        yield mine


def _name(file: str) -> str:
    """The path of a source file of the package, relative to the clone or to the folder of one's own; else the path."""
    path = Path(file)
    names = [path.relative_to(place) for place in _places() if path.is_relative_to(place)]
    return next((name.as_posix() for name in names if name.parts[0] == _TASKS.name), file)


def file_of(cls: type) -> str:
    """The source file of a class, as a path from the root of the clone."""
    return own.shown(_name(_source(cls)))


def _source(cls: type) -> str:
    return str(getattr(sys.modules.get(cls.__module__), "__file__", "") or cls.__module__)


def _line_of(cls: type) -> str:
    """File and line of a class."""
    try:
        return f"{file_of(cls)}, line {inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return file_of(cls)
