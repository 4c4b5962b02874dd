"""Questions and passages: JSON rows in, checked dataclasses out, and back.

What one field may hold is said by its type (`tasks/types.py`); the rules between the fields of a row stand here. Rules
between rows (duplicates, gold ids, leakage) belong to `ingest`. Nothing is repaired in silence, except that an answer
which normalises to nothing is left out while a usable one remains: no score could ever match it.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tasks.records import schema
from tasks.records.schema import shown
from tasks.store import DataError, Row, read_jsonl
from tasks.text import normalize
from tasks.types import Hop, Passage, Question, Split

T = TypeVar("T")
SPLITS: tuple[Split, ...] = typing.get_args(Split)
GENERATED = "generated:"
"""The beginning of the ids of documents that a model wrote; no passage may have such an id."""
JOINED = ("gold_passages",)
"""Fields of a `Question` that no row of `questions.jsonl` has: the stage `inputs` joins them from other files."""
MAX_FAULTS = 5
"""So many wrong fields of a row are named; a list of answers may have hundreds."""


class UnscorableError(DataError):
    """Every answer of a question normalises to nothing, so that no prediction can be right."""


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
    row = schema.plain(question)
    for name in JOINED:
        del row[name]
    for hop in row["decomposition"]:
        if not hop["queries"]:  # Real data has no reference queries, and its rows stay as they are.
            del hop["queries"]
    return row


def passage_row(passage: Passage) -> Row:
    """The JSON object of a passage; `to_passage` inverts it."""
    return schema.plain(passage)


def to_question(row: Row, where: str) -> Question:
    """Check one JSON object and make it a `Question`; answers that normalise to nothing are left out.

    Args:
        row: the parsed object.
        where: file and row, the beginning of every message.

    Raises:
        UnscorableError: no answer survives normalisation.
        DataError: anything else the schema forbids.
    """
    for name in JOINED:
        if name in row:
            raise _unknown(name, Question, where)
    question = parsed(Question, row, where)
    _check_gold(question, where)
    answers = tuple(answer for answer in question.answers if normalize(answer))
    if not answers:
        expected = "an answer with a letter or digit besides articles and punctuation"
        raise UnscorableError(_message(where, "answers", list(question.answers), expected))
    return question if len(answers) == len(question.answers) else dataclasses.replace(question, answers=answers)


def to_passage(row: Row, where: str) -> Passage:
    """Check one JSON object and make it a `Passage`; the title may be empty, id and text may not."""
    passage = parsed(Passage, row, where)
    if passage.id.startswith(GENERATED):
        expected = f"an id that does not begin with {GENERATED!r}, as those of written documents do"
        raise wrong_field(where, "id", passage.id, expected)
    return passage


def known_fields(kind: type) -> tuple[str, ...]:
    """Names of the fields of a row, in order."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in JOINED)


def split_contents(whole: str) -> tuple[str, str]:
    r"""Title and text of a passage as Search-R1 writes it: the first line without its quotes, and the rest.

    Its lines end with \n (`tasks.text.spelled`).

    >>> split_contents('"Bern"\nA city.')
    ('Bern', 'A city.')
    """
    title, _, text = whole.partition("\n")
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def parsed(kind: type[T], row: object, where: str) -> T:
    """The dataclass that a JSON object stands for, each field checked against its type.

    Raises:
        DataError: fields are missing, unknown or wrong; the message starts with `where` and names all of them, of wrong
            ones the first few.
    """
    try:
        made: T = schema.adapter(kind).validate_python(row)
        return made
    except ValidationError as error:
        faults, missing = schema.faults(error), schema.missing_fields(error)
    wrong = [fault for fault in faults if fault.owner or fault.reason != "missing_field"]

    errors: list[DataError] = []
    for fault in wrong[:MAX_FAULTS]:
        errors.append(_wrong("Also" if errors else where, fault, kind))
    if missing:
        errors.append(_missing("Also" if errors else where, missing))
    more = [f"And {len(wrong) - MAX_FAULTS} more faults."] if len(wrong) > MAX_FAULTS else []
    raise DataError(" ".join([*map(str, errors), *more]), errors[0].reason)


def _wrong(where: str, fault: schema.Fault, kind: type) -> DataError:
    inside = f"{where}: {fault.owner}" if fault.owner else where
    if fault.reason == "missing_field":
        return _missing(inside, [fault.field])
    if fault.reason == "unknown_field":
        return _unknown(fault.field, Hop if fault.owner else kind, inside)
    return wrong_field(inside, fault.field, fault.found, fault.expected)


def _missing(where: str, names: list[str]) -> DataError:
    listed = ", ".join(map(repr, names))
    what = f"field {listed} is missing. Add it" if len(names) == 1 else f"fields {listed} are missing. Add them"
    return DataError(f"{where}: {what} to the row.", "missing_field")


def wrong_field(where: str, name: str, found: object, expected: str) -> DataError:
    """The error of a field with a wrong value."""
    return DataError(_message(where, name, found, expected))


def _message(where: str, name: str, found: object, expected: str) -> str:
    return f"{where}: field {name!r}: found {shown(found)}, expected {expected}. Correct the row."


def _unknown(name: str, kind: type[Any], where: str) -> DataError:
    known = known_fields(kind)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Remove it; known fields: {', '.join(known)}."
    return DataError(f"{where}: unknown field {name!r}. {hint}", "unknown_field")


def _check_gold(question: Question, where: str) -> None:
    gold, silver = question.gold_passage_ids, question.silver_passage_ids
    for name, ids in (("gold_passage_ids", gold), ("silver_passage_ids", silver)):
        if len(set(ids)) < len(ids):
            twice = next(value for i, value in enumerate(ids) if value in ids[:i])
            raise wrong_field(where, name, twice, "different ids, not the same one twice")
    if question.gold_complete and not gold:
        raise wrong_field(where, "gold_complete", True, "false, because gold_passage_ids is empty")
    if gold and question.gold_method == "none":
        expected = "'annotated' or 'derived', because gold_passage_ids is not empty"
        raise wrong_field(where, "gold_method", "none", expected)
    if both := set(gold) & set(silver):
        raise wrong_field(where, "silver_passage_ids", min(both), "no id that is in gold_passage_ids as well")
