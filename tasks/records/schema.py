"""Reads and writes rows of JSONL files as dataclasses, and says in one line what is wrong with a row.

A row is a frozen dataclass with the decorator `row`; pydantic checks it against its annotations when it is read. Rules
between fields and between rows are expectations (`tasks/data/expectations.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, AllowInfNan, ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from tasks.store import DataError, Row, read_jsonl, write_jsonl

T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _zero_or_one(value: float) -> float:
    if value not in (0, 1):
        raise ValueError("0 or 1")
    return value


Count = Annotated[int, Strict(), Field(ge=0)]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Match = Annotated[Number, AfterValidator(_zero_or_one)]

# Pydantic's name of a fault -> what was expected, in the words of the other messages; {…} are its arguments.
_EXPECTED = {
    "string_type": "text",
    "string_unicode": "text without lone surrogates (half of a \\u pair)",
    "string_pattern_mismatch": "text that is not blank",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a JSON object",
    "dataclass_type": "a JSON object",
    "finite_number": "a finite number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "literal_error": "{expected}",
    "value_error": "{error}",
}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def row(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass with named arguments; when a row is read, an unknown field is a fault."""
    return with_config(ConfigDict(extra="forbid"))(dataclass(frozen=True, kw_only=True)(cls))


# Kept, because making one takes milliseconds, which is too long for every row.
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def adapter(cls: type) -> TypeAdapter[Any]:
    """The validator and serializer of a row."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def plain(row_: Any) -> Row:
    """The JSON object of a row."""
    return dict(adapter(type(row_)).dump_python(row_))


def fault(cls: type[Any], tree: object) -> str | None:
    """The first thing that is wrong with a JSON value that should be a row: `em: found 'yes', expected a number`."""
    try:
        adapter(cls).validate_python(tree)
    except ValidationError as error:
        return _message(error)
    return None


def fault_in(row_: Any) -> str | None:
    """The first thing for which `read` would refuse this row; see `fault`."""
    return fault(type(row_), adapter(type(row_)).dump_python(row_, warnings=False))


def parse(cls: type[T], tree: object, where: str) -> T:
    """The row of a JSON value.

    Raises:
        DataError: the value breaks the schema; the message starts with `where`.
    """
    try:
        parsed: T = adapter(cls).validate_python(tree)
        return parsed
    except ValidationError as error:
        raise DataError(f"{where}: {_message(error)}. Run the stage that wrote the file again.") from None


def read(cls: type[T], path: Path) -> Iterator[tuple[int, T]]:
    """Stream (row number from 1, row) of a `.jsonl` file; raises as `store.read_jsonl` and `parse`."""
    for number, tree in read_jsonl(path):
        yield number, parse(cls, tree, f"{path}: row {number}")


def write(path: Path, rows: Iterable[Any]) -> int:
    """Stream rows to `path` atomically; returns how many."""
    return write_jsonl(path, map(plain, rows))


@dataclass(frozen=True)
class Fault:
    """What is wrong with a row.

    Attributes:
        owner: the object within the row that has the fault, such as `turns[1]`; empty for the row itself.
        field: of that object, such as `logprobs[0]`; empty where the object as a whole is wrong.
        reason: `missing_field`, `unknown_field` or `bad_field`.
        found: the value.
        expected: in words.
    """

    owner: str
    field: str
    reason: str
    found: object
    expected: str


_REASONS = {
    "missing": "missing_field",
    "missing_keyword_only": "missing_field",
    "extra_forbidden": "unknown_field",
    "unexpected_keyword_argument": "unknown_field",
}


def faults(error: ValidationError) -> list[Fault]:
    """Every fault. Unknown fields go before others, because one may be the misspelt name of a missing field."""
    errors = error.errors(include_url=False)
    # Of a list, only valid elements are counted: one whose elements are all wrong would be called too short as well.
    inside = {one["loc"][:length] for one in errors for length in range(len(one["loc"]))}
    errors = [one for one in errors if one["loc"] not in inside]
    return [_fault(one) for one in sorted(errors, key=lambda one: _REASONS.get(one["type"]) != "unknown_field")]


def _fault(error: ErrorDetails) -> Fault:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    owner, _, name = place.rpartition(".")
    expected = _EXPECTED.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    return Fault(owner, name, _REASONS.get(error["type"], "bad_field"), error["input"], expected)


def missing_fields(error: ValidationError) -> list[str]:
    """Every field that the row itself lacks."""
    errors = error.errors(include_url=False)
    return [
        str(one["loc"][0]) for one in errors if _REASONS.get(one["type"]) == "missing_field" and len(one["loc"]) == 1
    ]


def _message(error: ValidationError) -> str:
    fault = faults(error)[0]
    place = ".".join(filter(None, (fault.owner, fault.field)))
    if fault.reason == "missing_field":
        return f"field {place!r} is missing"
    if fault.reason == "unknown_field":
        return f"unknown field {place!r}"
    return f"{place}{': ' if place else ''}found {shown(fault.found, 80)}, expected {fault.expected}"


def shown(value: object, width: int = 60) -> str:
    """A found value for a message: printable, cut to `width`, with its type unless that is obvious."""
    text = ascii(value) if isinstance(value, str) and _SURROGATE.search(value) else repr(value)
    text = text if len(text) <= width else f"{text[: width - 3]}..."
    return text if value is None or isinstance(value, str | bool | list) else f"{text} ({type(value).__name__})"
