"""The only reader of `params.yaml` and `conf/`: YAML in, checked dataclasses out.

A settings dataclass stands beside the code it configures; this module fills it and refuses unknown
keys, missing keys, wrong types and values outside `Literal` choices, naming file, key, what was found
and what was expected. Bounds are checked by the dataclass itself in `__post_init__` (ValueError).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

T = TypeVar("T")
Tree = dict[str, Any]

PARAMS = Path("params.yaml")
CONF = Path("conf")
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")  # YAML 1.1 reads 1e-6 as text.


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """The `evaluate` section of `params.yaml`.

    Attributes:
        top_k: passages per search; 0 takes the scale's, with which training searches.
        max_questions: play at most this many (a seeded sample, spread over datasets); 0 plays all.
        num_bootstrap: resamples behind each 95% interval.
        sampled: also play once at temperature 1 with a fixed seed, reported beside greedy.
        max_failed_share: of all trajectories, how many may fail because a search did and count as wrong; more end
            the evaluation, so that an outage never looks like a poor policy.
    """

    top_k: int
    max_questions: int
    num_bootstrap: int
    sampled: bool
    max_failed_share: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.max_failed_share < 1, "max_failed_share", self.max_failed_share, "a share from 0, below 1")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (as in training) or more")
        require(self.max_questions >= 0, "max_questions", self.max_questions, "0 (all) or more")
        require(self.num_bootstrap >= 100, "num_bootstrap", self.num_bootstrap, "at least 100")


@dataclasses.dataclass(frozen=True)
class Params:
    """`params.yaml`: which runs exist. Each name selects a file of that name under `conf/`.

    `augment` may be left out; the stage of that name then has nothing to read.
    """

    scale: str
    data: str
    data_folder: str
    model: str
    retriever: str
    generator: Literal["plain", "vllm"]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    evaluate: Evaluate
    compare_retrievers: tuple[str, ...] = ()
    augment: str = ""

    def __post_init__(self) -> None:
        require(bool(self.methods), "methods", self.methods, "at least one name of conf/method/")
        require(bool(self.seeds), "seeds", self.seeds, "at least one integer")
        require(min(self.seeds, default=0) >= 0, "seeds", self.seeds, "integers from 0")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "different integers")
        require(len(set(self.methods)) == len(self.methods), "methods", self.methods, "different names")
        compared = self.compare_retrievers
        require(len(set(compared)) == len(compared), "compare_retrievers", compared, "different names")


@dataclasses.dataclass(frozen=True)
class Compare:
    """One file of `conf/compare/`: methods and seeds that are set side by side."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        require(bool(self.methods), "methods", self.methods, "at least one name of conf/method/")
        require(bool(self.seeds) and min(self.seeds) >= 0, "seeds", self.seeds, "at least one integer, 0 or more")


def require(holds: bool, key: str, found: object, expected: str) -> None:
    """Raise the ValueError for a setting outside its bounds; `fill` prefixes the file."""
    if not holds:
        raise ValueError(f"{key}={found!r}: expected {expected}.")


def params(root: Path = Path(".")) -> Params:
    """Read and check `params.yaml`, and that every file it names exists."""
    return check(read_yaml(root / PARAMS), root)


def check(tree: Mapping[str, Any], root: Path = Path(".")) -> Params:
    """The settings `params.yaml` would give with this content; ValueErrors as if it stood there."""
    result = fill(Params, tree, str(PARAMS))
    for kind, names in (
        ("scale", [result.scale]),
        ("data", [result.data]),
        ("model", [result.model]),
        ("retriever", [result.retriever, *result.compare_retrievers]),
        ("augment", [result.augment] if result.augment else []),
        ("method", result.methods),
    ):
        for name in names:
            path_of(kind, name, root)
    return result


def path_of(kind: str, name: str, root: Path = Path("."), where: str = str(PARAMS)) -> Path:
    """`conf/<kind>/<name>.yaml`; a ValueError says `where` the name stands and lists those there are."""
    path = root / CONF / kind / f"{name}.yaml"
    if Path(name).name != name or not path.is_file():
        known = sorted(p.stem for p in (root / CONF / kind).glob("*.yaml"))
        hint = _did_you_mean(name, known)
        raise ValueError(f"{where}: unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")
    return path


def compare(name: str, root: Path = Path(".")) -> Compare:
    """`conf/compare/<name>.yaml`, and that every method it names exists; `check` knows the other bounds."""
    path_of("compare", name, root, "--compare")
    found = load(Compare, "compare", name, root=root)
    for method in found.methods:
        path_of("method", method, root, f"{CONF}/compare/{name}.yaml")
    return found


def section(kind: str, name: str, root: Path = Path(".")) -> Tree:
    """The raw mapping of `conf/<kind>/<name>.yaml`."""
    return read_yaml(path_of(kind, name, root))


def derived(kind: str, name: str, root: Path = Path("."), own: tuple[str, ...] = ()) -> Tree:
    """`section`, with the keys of the file that its key `like` names, and of that one's, wherever it gives none.

    Args:
        kind, name, root: as `section`.
        own: keys that are never taken over.

    Raises:
        ValueError: an unknown name, or names that go round in a circle.
    """
    chain, trees = [name], [section(kind, name, root)]
    while (other := trees[-1].pop("like", None)) is not None:
        where = f"{CONF}/{kind}/{chain[-1]}.yaml: like"
        if other in chain:
            raise ValueError(f"{where}: goes round in a circle: {' -> '.join((*chain, str(other)))}.")
        if not isinstance(other, str) or not other.isidentifier():
            raise ValueError(f"{where}={other!r}: expected the name of another file of conf/{kind}/.")
        chain.append(other)
        trees.append(read_yaml(path_of(kind, str(other), root, where)))
    tree: Tree = {}
    for each in reversed(trees):
        tree = merge({key: value for key, value in tree.items() if key not in own}, each)
    return tree


def load(cls: type[T], kind: str, name: str, key: str | None = None, root: Path = Path(".")) -> T:
    """Fill `cls` from `conf/<kind>/<name>.yaml`, or from its top-level `key`."""
    tree, where = section(kind, name, root), f"{CONF}/{kind}/{name}.yaml"
    if key is not None:
        if key not in tree:
            raise ValueError(f"{where}: section {key!r} is missing. Add it; see another file of conf/{kind}/.")
        tree, where = tree[key], f"{where}: {key}"
    return fill(cls, tree, where)


class _Loader(yaml.SafeLoader):
    """The safe loader, refusing a key that stands twice in one mapping; YAML would keep the last in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"key {key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return node


def read_yaml(path: Path) -> Tree:
    """Parse one YAML mapping; syntax errors, repeated keys and other shapes are ValueErrors that name the file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing. Run from the root of the clone.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: found {type(tree).__name__}, expected a mapping of settings.")
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> Tree:
    """`base` with the keys of `over` replaced, mappings merged key by key."""
    result = dict(base)
    for key, value in (over or {}).items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def fill(cls: type[T], tree: Mapping[str, Any], where: str) -> T:
    """Build dataclass `cls` from `tree`.

    Raises:
        ValueError: unknown, missing or mistyped key, or a bound of the dataclass; starts with `where`.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"{where}: found {tree!r}, expected a mapping with the keys of {cls.__name__}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            hint = _did_you_mean(str(key), list(fields))
            raise ValueError(f"{where}: unknown key {key!r}.{hint} Known: {', '.join(fields)}.")
    values: Tree = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _cast(hints[name], tree[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: key {name!r} is missing. Add it ({_describe(hints[name])}).")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def plain(value: object) -> Any:
    """A settings dataclass as YAML- and JSON-ready data: what was actually used, for the record."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _cast(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:  # Checked by the dataclass itself.
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = (a for a in args if a is not type(None))
        return _cast(hint, value, where)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: found {value!r}, expected one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: found {value!r}, expected a list of {_describe(args[0])}.")
        return tuple(_cast(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: found {value!r}, expected a mapping.")
        return {str(k): _cast(args[1], item, f"{where}.{k}") for k, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return fill(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ValueError(f"{where}: found {value!r} ({type(value).__name__}), expected {_describe(hint)}.")


def _describe(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    return {int: "an integer", float: "a number", str: "text", bool: "true or false"}.get(hint) or str(hint).replace(
        "typing.", ""
    )


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
