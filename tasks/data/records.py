"""The one schema of questions and passages: JSON rows in, checked dataclasses out, and back.

Every rule that one row can break is checked here. Rules between rows (duplicates, gold ids, leakage)
belong to `ingest`. Nothing is repaired in silence, except that an answer which normalises to nothing
is left out while a usable one remains: no score could ever match it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.store import DataError, Row, read_jsonl
from tasks.text import normalize
from tasks.types import MAX_HOPS, Hop, Passage, Question, Split

SPLITS: tuple[str, ...] = typing.get_args(Split)
GOLD_METHODS = ("annotated", "derived", "none")
GENERATED = "generated:"
"""How the id of a document begins that a model wrote; no passage may have such an id."""

JOINED = ("gold_passages",)
"""Fields of a `Question` that no row of `questions.jsonl` has: the stage `inputs` joins them from other files."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_MISSING = object()


class UnscorableError(DataError):
    """Every answer of a question normalises to nothing, so that no prediction could ever be right."""


def read_questions(path: Path) -> Iterator[Question]:
    """Stream the questions of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        DataError: the first row that breaks the schema, by file, row and field.
    """
    for number, row in read_jsonl(path):
        yield to_question(row, f"{path}: row {number}")


def read_passages(path: Path) -> Iterator[Passage]:
    """Stream the passages of a `.jsonl` or `.jsonl.gz` file; raises as `read_questions`."""
    for number, row in read_jsonl(path):
        yield to_passage(row, f"{path}: row {number}")


def question_row(question: Question) -> Row:
    """The JSON object of a question; `to_question` inverts it."""
    row = dataclasses.asdict(question)
    row["decomposition"] = [_hop_row(hop) for hop in question.decomposition]
    return {name: value for name, value in row.items() if name not in JOINED}


def passage_row(passage: Passage) -> Row:
    """The JSON object of a passage; `to_passage` inverts it."""
    return dataclasses.asdict(passage)


def to_question(row: Row, where: str) -> Question:
    """Check one JSON object and make it a `Question`.

    `id`, `dataset`, `split`, `question`, `answers` and `hops` must be there; the other fields have
    the defaults of `Question`. Answers that normalise to nothing are left out.

    Args:
        row: the parsed object.
        where: file and row, the beginning of every message.

    Raises:
        UnscorableError: no answer survives normalisation.
        DataError: anything else the schema forbids.
    """
    fields = Fields(row, where, Question)
    question = Question(
        id=fields.text("id"),
        dataset=fields.text("dataset"),
        split=typing.cast(Split, fields.choice("split", SPLITS)),
        question=fields.text("question"),
        answers=fields.texts("answers"),
        hops=fields.whole("hops", 1, MAX_HOPS),
        type=fields.optional_text("type"),
        decomposition=fields.items("decomposition", to_hop),
        gold_passage_ids=fields.ids("gold_passage_ids"),
        gold_method=typing.cast(Any, fields.choice("gold_method", GOLD_METHODS)),
        gold_complete=fields.flag("gold_complete"),
        silver_passage_ids=fields.ids("silver_passage_ids"),
        source=fields.text("source", empty=True),
    )
    _check_gold(question, fields)
    return dataclasses.replace(question, answers=_scorable(question.answers, fields))


def to_passage(row: Row, where: str) -> Passage:
    """Check one JSON object and make it a `Passage`; the title may be empty, id and text may not."""
    fields = Fields(row, where, Passage)
    name = fields.text("id")
    if name.startswith(GENERATED):
        raise fields.error(
            "id", name, f"an id that does not begin with {GENERATED!r}, as those of written documents do"
        )
    return Passage(
        id=name,
        title=fields.text("title", empty=True),
        text=fields.text("text"),
        datasets=fields.texts("datasets", empty=True),
    )


def known_fields(kind: type) -> tuple[str, ...]:
    """Names of the fields of a record, in order."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in JOINED)


def to_hop(row: Row, where: str) -> Hop:
    """Check one JSON object and make it a `Hop`; raises as `to_question`."""
    fields = Fields(row, where, Hop)
    return Hop(
        question=fields.text("question"),
        answer=fields.text("answer"),
        support_passage_id=fields.optional_text("support_passage_id"),
        queries=fields.texts("queries", empty=True),
    )


def _hop_row(hop: Hop) -> Row:
    row = dataclasses.asdict(hop)
    if not hop.queries:  # Real data has no reference queries; leave its rows as they were.
        del row["queries"]
    return row


def _scorable(answers: tuple[str, ...], fields: Fields) -> tuple[str, ...]:
    kept = tuple(answer for answer in answers if normalize(answer))
    if not kept:
        raise UnscorableError(
            fields.message(
                "answers", list(answers), "an answer with a letter or digit besides articles and punctuation"
            )
        )
    return kept


def _check_gold(question: Question, fields: Fields) -> None:
    gold = question.gold_passage_ids
    if question.gold_complete and not gold:
        raise fields.error("gold_complete", True, "false, because gold_passage_ids is empty")
    if gold and question.gold_method == "none":
        raise fields.error("gold_method", "none", "'annotated' or 'derived', because gold_passage_ids is not empty")
    if both := set(gold) & set(question.silver_passage_ids):
        raise fields.error("silver_passage_ids", min(both), "no id that is in gold_passage_ids as well")


class Fields:
    """Typed access to the fields of one row; each failure names file, row, field, found, expected."""

    def __init__(self, row: Row, where: str, kind: type) -> None:
        self.row, self.where = row, where
        known = known_fields(kind)
        self.defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
        for name in row:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Remove it; known fields: {', '.join(known)}."
                raise DataError(f"{where}: unknown field {name!r}. {hint}", "unknown_field")

    def message(self, name: str, found: object, expected: str) -> str:
        return f"{self.where}: field {name!r}: found {shown(found)}, expected {expected}. Correct the row."

    def error(self, name: str, found: object, expected: str) -> DataError:
        return DataError(self.message(name, found, expected))

    def get(self, name: str) -> Any:
        value = self.row.get(name, self.defaults.get(name, _MISSING))
        if value is _MISSING:
            raise DataError(f"{self.where}: field {name!r} is missing. Add it to the row.", "missing_field")
        return value

    def text(self, name: str, empty: bool = False) -> str:
        return self._as_text(name, self.get(name), empty)

    def optional_text(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else self._as_text(name, value, False)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, f"one of {', '.join(map(repr, choices))}")
        return value

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def texts(self, name: str, empty: bool = False) -> tuple[str, ...]:
        values = self._as_list(name)
        if not values and not empty:
            raise self.error(name, values, "a list with at least one text")
        return tuple(self._as_text(f"{name}[{i}]", value, False) for i, value in enumerate(values))

    def ids(self, name: str) -> tuple[str, ...]:
        values = self.texts(name, empty=True)
        if len(set(values)) < len(values):
            twice = next(value for i, value in enumerate(values) if value in values[:i])
            raise self.error(name, twice, "different ids, not the same one twice")
        return values

    def items(self, name: str, make: Callable[[Row, str], Hop]) -> tuple[Hop, ...]:
        values = self._as_list(name)
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{name}[{i}]", value, "a JSON object")
        return tuple(make(value, f"{self.where}: {name}[{i}]") for i, value in enumerate(values))

    def _as_list(self, name: str) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list | tuple):  # A tuple is a default of the dataclass.
            raise self.error(name, values, "a list")
        return list(values)

    def _as_text(self, name: str, value: object, empty: bool) -> str:
        if not isinstance(value, str):
            raise self.error(name, value, "text")
        if not empty and not value.strip():
            raise self.error(name, value, "text that is not blank")
        if _SURROGATE.search(value):
            raise self.error(name, value, "text without lone surrogates (half of a \\u pair)")
        return value


def shown(value: object, width: int = 60) -> str:
    """A found value for a message: printable, cut to `width`, with its type unless that is obvious."""
    text = ascii(value) if isinstance(value, str) and _SURROGATE.search(value) else repr(value)
    text = text if len(text) <= width else f"{text[: width - 3]}..."
    return text if value is None or isinstance(value, str | bool | list) else f"{text} ({type(value).__name__})"
