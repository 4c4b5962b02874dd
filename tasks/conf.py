"""The only reader of settings: it turns YAML into checked dataclasses. `tasks.params` has the keys of `params.yaml`.

A settings dataclass is defined beside the code that it configures, and pydantic fills it. Types are strict, and unknown
keys are refused. The bounds of one field stand in its type (`Annotated[int, Field(ge=1)]`), rules between fields in
`__post_init__` (`require`). Every error names file, key, what was found and what was expected.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import difflib
import functools
import json
import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tasks import own

T = TypeVar("T")
Tree = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e30)]
"""Weights and their updates are of 32 bits; see `LARGEST`."""
LARGEST = 3.4e38
"""Of the numbers of 32 bits, in which weights are trained."""


def _one_line(title: str) -> str:
    if title != title.strip() or not title or not title.isprintable():
        raise ValueError(f"found {shown(title)}, expected one line of printable text without blanks around it.")
    return title


Title = Annotated[str, AfterValidator(_one_line)]
"""The name of a system in tables; a line break would split a row, and a blank name would leave one nameless."""

PARAMS = Path("params.yaml")
CONF = Path("conf")
# Programs that others start, such as the tools of a chat program, begin in whatever folder those like.
ROOT = Path(".") if any(CONF.glob("*/*.yaml")) else Path(__file__).resolve().parents[1]
"""Root of the clone: the working folder where it is one, else where this code lies."""
MAX_NODES = 20_000
"""Most nodes of a YAML file with its aliases replaced by what they stand for; our largest file has a few hundred."""

MAX_BYTES = 4 << 20
"""Of a YAML file; our largest, which has prompts, has some thousands."""

IN_COMMANDS = ("method", "system", "reward_model", "reader", "start")
"""Folders whose names stand in the commands of `dvc.yaml`, in names of folders and in `extends`."""
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAX_SHOWN = 300
"""Most characters of a value in a message."""
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 3, 12, 12, 12
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_SHOWN

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def require(holds: bool, key: str, found: object, expected: str) -> None:
    """Raise the ValueError for a setting outside its bounds; `fill` prefixes the file."""
    if not holds:
        raise ValueError(f"{key}={shown(found)}: expected {expected}.")


def is_trainable(value: object) -> bool:
    """Whether a value is a number that stays finite in the 32 bits in which it is trained."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) <= LARGEST
    except OverflowError:  # A whole number of more digits than a float can have.
        return False


def shown(found: object) -> str:
    """A value for a message, cut to `MAX_SHOWN` characters, because a wrong value may be as large as memory."""
    text = _REPR.repr(found)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def known(names: Sequence[str]) -> str:
    """The known names, as the end of a message about an unknown one."""
    return f"Known: {', '.join(names)}." if names else "There is none yet."


def path_of(kind: str, name: str, root: Path = ROOT, where: str = str(PARAMS)) -> Path:
    """`conf/<kind>/<name>.yaml`, of the clone or of one's own folder (`tasks.own`).

    The ValueError for an unknown name begins with `where` and lists the known ones.
    """
    file = Path(kind_of((kind,), name, root, where), f"{name}.yaml")
    return next(place / file for place in own.settings(root) if (place / file).is_file())


def names(kind: str, root: Path = ROOT) -> list[str]:
    """Names of the files `conf/<kind>/*.yaml`, one's own included."""
    return sorted({path.stem for place in own.settings(root) for path in (place / kind).glob("*.yaml")})


def kind_of(kinds: Sequence[str], name: str, root: Path = ROOT, where: str = str(PARAMS)) -> str:
    """The one of these folders of `conf/` that has a file of that name.

    Raises:
        ValueError: none of them has, or more than one, or the name does not fit; the message begins with `where`.
    """
    known_names = {kind: names(kind, root) for kind in kinds}
    having = [kind for kind in kinds if name in known_names[kind]]
    if having and having[0] in IN_COMMANDS and not PLAIN.fullmatch(name):
        raise ValueError(
            f"{where}: {name!r}: found a name that commands cannot hold, expected ASCII letters, digits and _, no "
            f"digit first. Rename {CONF}/{having[0]}/{name}.yaml."
        )
    if not having:
        all_names = sorted({one for each in known_names.values() for one in each})
        hint = did_you_mean(name, all_names)
        is_elsewhere = not hint and kinds[0] in IN_COMMANDS and own.folder(root) is None
        more = " One of your own lies in a folder that PARTS= names." if is_elsewhere else ""
        raise ValueError(f"{where}: unknown {kinds[0]} {name!r}.{hint} {known(all_names)}{more}")
    if len(having) > 1:
        files = " and ".join(f"{CONF}/{kind}/{name}.yaml" for kind in having)
        raise ValueError(f"{where}: {name!r} names {files}. Rename one of them.")
    return having[0]


def modules(folder: Path) -> list[Path]:
    """The Python files of a folder that can be imported, in order; editors leave others, such as `.#answer.py`."""
    return sorted(path for path in folder.glob("*.py") if path.stem.isidentifier())


def section(kind: str, name: str, root: Path = ROOT) -> Tree:
    """The mapping of `conf/<kind>/<name>.yaml`, with what is set for this run."""
    return laid_over(kind, name, read_yaml(path_of(kind, name, root)), root)


def load(cls: type[T], kind: str, name: str, key: str | None = None, root: Path = ROOT) -> T:
    """Fill `cls` from `conf/<kind>/<name>.yaml`, or from its top-level `key`."""
    tree, where = section(kind, name, root), f"{CONF}/{kind}/{name}.yaml"
    if key is not None:
        if key not in tree:
            raise ValueError(f"{where}: section {key!r} is missing. Add it; see another file of conf/{kind}/.")
        tree, where = tree[key], f"{where}: {key}"
    return fill(cls, tree, where)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses a key that stands twice in a mapping, and aliases for too many values.

    PyYAML would keep the last of two equal keys in silence, and ten lines of aliases can stand for more than memory
    holds.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.sizes: dict[yaml.Node, int] = {}  # Of each finished node: how many nodes it has, aliases included.
        self.num_begun = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self.num_begun += 1
        if self.num_begun > MAX_NODES:  # Before the rest is read, which can take minutes.
            raise yaml.composer.ComposerError(None, None, f"it has more than {MAX_NODES:,} values", mark)
        node = super().compose_node(parent, index)
        assert node is not None
        if is_alias and node not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "an alias stands inside what it names", mark)
        if not is_alias:
            self.sizes[node] = 1 + sum(self.sizes[part] for part in _parts(node))
        if self.sizes[node] > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f"aliases stand for more than {MAX_NODES:,} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # A number of thousands of digits, a date that does not exist.
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"key {key.value!r} stands twice, expected each key once"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


# YAML 1.1 reads 1e-6 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> Tree:
    """Parse one YAML mapping; syntax errors, repeated keys and other shapes are ValueErrors that name the file."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{path}: found {size:,} bytes, expected a file of settings, of at most {MAX_BYTES:,}.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing. Run from the root of the clone.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:  # A folder, a circle of links, a file of somebody else.
        raise ValueError(
            f"{path}: found what cannot be read ({error.strerror}), expected a file of settings."
        ) from None
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: found {type(tree).__name__}, expected a mapping of settings.")
    return tree


def parse(text: str, where: str) -> Any:
    """What a YAML text says; a ValueError that starts with `where` if it cannot be read."""
    try:
        return copy.deepcopy(_parsed(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {_fault(error)}. Mend the file.") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid YAML: lists or mappings stand in each other too deep.") from None


def _fault(error: yaml.YAMLError) -> str:
    """What is wrong and in which line; PyYAML itself spreads it over several, and names no file."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split("\n")[:1])
    mark = error.problem_mark or error.context_mark
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    line = (mark.get_snippet(indent=0) if mark else None) or ""
    told = f"{', '.join(filter(None, (error.context, error.problem)))}{place}"
    return f"{told}: {line.splitlines()[0]}" if line else told


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Kept, because a plan reads the same files for every stage, and parsing them takes most of its time."""
    return yaml.load(text, _Loader)


def merge(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> Tree:
    """`base` with the keys of `over` replaced; mappings are merged, unless they are parts of different `kind`s."""
    result = dict(base)
    for key, value in (over or {}).items():
        inherited = result.get(key)
        if isinstance(value, Mapping) and isinstance(inherited, Mapping) and not _is_other_kind(inherited, value):
            value = merge(inherited, value)
        result[key] = value
    return result


def _is_other_kind(inherited: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "kind" in value and value["kind"] != inherited.get("kind")


@dataclasses.dataclass
class _Set:
    """What is set for one run; see `setting`.

    Attributes:
        tree: first words of dotted keys -> what they set.
        unused: (first word, second word) of what nothing has read yet.
    """

    tree: Mapping[str, Any]
    unused: set[tuple[str, str]]


_set: contextvars.ContextVar[_Set] = contextvars.ContextVar("set", default=_Set({}, set()))  # noqa: B039 - stays empty.


@contextlib.contextmanager
def setting(tree: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Inside the block these settings stand above the files of `conf/`, which stay as they are.

    Args:
        tree: folder of `conf/` -> settings of its files, `{"retriever": {"k1": 1.2}}`, or of the file that the next
            word names, `{"service": {"openai": {"timeout_s": 9}}}`; section of a scale -> its settings.
    """
    token = _set.set(_Set(tree, {(kind, key) for kind, settings in tree.items() for key in settings}))
    try:
        yield
    finally:
        _set.reset(token)


def not_read() -> set[tuple[str, str]]:
    """The first two words of what is set for this run and nothing has read yet."""
    return set(_set.get().unused)


def flow(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(plain(value), sort_keys=False, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def laid_over(kind: str, name: str, tree: Tree, root: Path = ROOT) -> Tree:
    """The settings of a file of `conf/`, or with an empty name of a section, with what is set for this run.

    A word that is a key of the file is this key, also where a file of the folder has the same name.
    """
    chosen = _set.get()
    for key, value in chosen.tree.get(kind, {}).items():
        changes: Any = {key: value}
        if name and key not in tree and key in names(kind, root):
            if key != name:
                continue
            require(isinstance(value, Mapping), f"{kind}.{key}", value, "settings of that file, such as "
                    f"{kind}.{key}.{next(iter(tree), 'key')}=1")  # fmt: skip
            changes = value
        tree = merge(tree, changes)
        chosen.unused.discard((kind, key))
    return tree


def fill(cls: type[T], tree: Mapping[str, Any], where: str) -> T:
    """The dataclass `cls` with the values of `tree`.

    Raises:
        ValueError: a key is unknown, missing or of the wrong type, or a bound is broken; starts with `where`.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"{where}: found {shown(tree)}, expected {_described(cls)}.")
    try:
        # Pydantic's strict mode takes a mapping for a dataclass, and a list for a tuple, only from JSON. Dates of YAML
        # become text.
        text = json.dumps([tree], default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found what JSON cannot hold ({error}), expected text, numbers and lists.") from None
    try:
        (made,) = _adapter(cls).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        # A misspelt key is an unknown and a missing one; the error of the unknown key helps more.
        first = min(error.errors(), key=lambda one: one["type"] != "unexpected_keyword_argument")
        raise ValueError(f"{where}{_explained(cls, first)}") from None
    return typing.cast(T, made)


@functools.cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    """Pydantic's checks of a dataclass, in a tuple: for a plain dataclass pydantic accepts no configuration."""
    return TypeAdapter(tuple[cls], config=_STRICT)  # type: ignore[valid-type]


_BOUNDS = {
    "ge": "{} or more",
    "gt": "a number above {}",
    "le": "{} or less",
    "lt": "a number below {}",
    "min_length": "at least {} in it",
}


def _explained(cls: type, error: ErrorDetails) -> str:
    """One error of pydantic in words for the reader of the file: the key, what was found, what was expected."""
    *parents, key = error["loc"][1:] or [""]  # `loc` begins with the place in the tuple of `_adapter`.
    above, owner = _place(cls, parents)
    place, hint = _place(cls, error["loc"][1:])
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(_bare(owner))]
        return f"{above}: unknown key {key!r}.{did_you_mean(str(key), known)} Known: {', '.join(known) or 'none'}."
    if kind == "missing":
        return f"{above}: key {key!r} is missing. Add it ({_described(hint)})."
    if kind == "value_error":
        return f"{place}: {context['error']}"
    if kind == "finite_number":
        bounds = _bounds(hint)
        return f"{place}={shown(found)}: expected a finite number{f', {bounds}' if bounds else ''}."
    if context.keys() & _BOUNDS.keys():
        return f"{place}={shown(found)}: expected {_bounds(hint)}."
    if kind == "json_invalid":
        return f": found settings that JSON cannot hold ({context['error']}), expected whole characters, not so deep."
    scalar = f" ({type(found).__name__})" if _bare(hint) in _NOUNS else ""
    return f"{place}: found {shown(found)}{scalar}, expected {_described(hint)}."


def _place(hint: Any, steps: Sequence[int | str]) -> tuple[str, Any]:
    """The path to a value as messages write it (`: parts: size`, `: sizes[1]`, `: shares.a`), and the value's type."""
    text = ""
    for step in steps:
        owner = _bare(hint)
        if dataclasses.is_dataclass(owner):
            text += f": {step}"
            hint = typing.get_type_hints(owner, include_extras=True).get(str(step), Any)
        else:
            text += f"[{step}]" if isinstance(step, int) else f".{step}"
            hint = next((one for one in reversed(typing.get_args(owner)) if one is not ...), Any)
    return text, hint


def _required(hint: Any) -> Any:
    """A type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(one for one in typing.get_args(hint) if one is not type(None))
    return hint


def _bare(hint: Any) -> Any:
    """A type without `| None` and `Annotated`."""
    hint = _required(hint)
    return _bare(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else hint


def _bounds(hint: Any) -> str:
    """All bounds of a field in words, with its description."""
    info = FieldInfo.from_annotation(_required(hint))
    named = [(words, getattr(note, name, None)) for note in info.metadata for name, words in _BOUNDS.items()]
    bounds = " and ".join(words.format(bound) for words, bound in named if bound is not None)
    return f"{bounds} ({info.description})" if info.description else bounds


_NOUNS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
}


def _described(hint: Any) -> str:
    """A type in words."""
    hint = _bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        names = ", ".join(field.name for field in dataclasses.fields(hint))
        return f"a mapping with the keys of {typing.cast(type, hint).__name__} ({names})"
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        element = _bare(args[0])
        return f"a list of {_NOUNS[element][1]}" if element in _NOUNS else "a list"
    if origin is dict:
        return "a mapping"
    return _NOUNS[hint][0] if hint in _NOUNS else str(hint).removeprefix("typing.")


def plain(value: object) -> Any:
    """A settings dataclass as data that YAML and JSON can hold; plans and summaries record settings in this form."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The nearest of the known names, as a sentence of a message; empty if none is near."""
    close = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
