"""Great Expectations suites for files that stages hand on: questions, passages, hops, labels, trajectories, results.

A guard, not a reader: rows are taken as they are, so that a file spoilt by hand or by a bug is described
as a whole, not refused at its first row. What a question or a passage may be is said by the reader of their rows
(`tasks/data/records.py`), what one field of a score or trajectory may hold by its schema (`tasks/records`); here stand
the rules between rows, and between fields of the latter. Files are streamed in batches; only 20 bytes
a row stay in memory: its file, its number and a hash of its key. Great Expectations is imported nowhere else, and only
when a check runs (about 3 s); files of one kind are checked together, because each suite and its pages cost half a
second.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tasks.data.decomposition import REFERENCE
from tasks.data.ingest import contains, key_of
from tasks.data.records import known_fields, to_passage, to_question
from tasks.records import schema
from tasks.records.played import LabelRow
from tasks.records.schema import shown
from tasks.records.scores import ScoreRow
from tasks.records.trajectories import TrajectoryRow
from tasks.store import DataError, Row, dump, read_jsonl
from tasks.text import normalize
from tasks.types import MAX_HOPS, Hop

if TYPE_CHECKING:
    import pandas

Kind = Literal["questions", "passages", "augmented", "labels", "trajectories", "results"]
Cells = dict[str, Any]
Place = tuple[str, int]  # A file and the number of a row, from 1.

BATCH_ROWS = 20_000
_EXAMPLES = 5
_ROWS = "number of rows"


@dataclass(frozen=True)
class Rule:
    """One expectation: a class of `great_expectations.expectations`, its arguments, and its meaning in words."""

    expectation: str
    arguments: dict[str, Any]
    meaning: str

    @property
    def column(self) -> str:
        """The column, or the two of a pair; empty for a rule about the table."""
        return "/".join(str(self.arguments[key]) for key in ("column", "column_A", "column_B") if key in self.arguments)


@dataclass(frozen=True)
class Suite:
    """What one kind of file must satisfy.

    Attributes:
        cells: flattens a row; a cell named like a field stands for that field, None for a value of a wrong kind.
        rules: checked batch by batch.
        key: the fields that together identify a row; empty where rows may repeat.
    """

    cells: Callable[[Row], Cells]
    rules: tuple[Rule, ...]
    key: tuple[str, ...]


@dataclass
class _Tally:
    """The result of one rule over all batches; `examples` are the first (place, found) pairs that violate it."""

    rule: Rule
    num_rows: int = 0
    num_broken: int = 0
    examples: list[tuple[Place, str]] = field(default_factory=list)
    crash: str = ""


def check(
    kind: Kind, paths: Sequence[Path], docs_folder: Path, corpus: Path | None = None, batch_rows: int = BATCH_ROWS
) -> dict[str, Any]:
    """Check JSONL files of one kind against their suite and write Data Docs to `docs_folder/<kind>`.

    Args:
        kind: which suite.
        paths: each `.jsonl` or `.jsonl.gz`.
        docs_folder: its subfolder `kind` is replaced; it holds time stamps, so no stage may depend on it.
        corpus: for questions and augmented: their passage ids must be ids of this file.
        batch_rows: rows in memory at once; the result does not depend on it.

    Returns:
        `{kind, files, rows, expectations: [{expectation, column, meaning, rows, success}]}`, the same for
        the same files.

    Raises:
        DataError: a file cannot be read, or expectations are violated; then one line for each and file, with
            rows, column, found values and rule. Data Docs are written in that case too.
    """
    suite = _SUITES[kind](None if corpus is None else _corpus_keys(corpus))
    docs = docs_folder / kind
    validator = _Validator(docs)
    tallies = [_Tally(rule) for rule in suite.rules]
    files, numbers, keys = array("i"), array("Q"), array("Q")
    rows = (((str(path), number), row) for path in paths for number, row in read_jsonl(path))
    index = {str(path): file for file, path in enumerate(paths)}

    while batch := list(itertools.islice(rows, batch_rows)):
        files.extend(index[file] for (file, _), _ in batch)
        numbers.extend(number for (_, number), _ in batch)
        keys.extend(key_of(dump([file, *(row.get(name) for name in suite.key)])) for (file, _), row in batch)
        validator.run(kind, tallies, _frame(batch, suite.cells), dict(batch))

    whole = [_Tally(rule) for rule in _whole_rules(suite.key)]
    validator.run(f"{kind}_files", whole[:1], _file_frame(list(index), files), {})
    if suite.key:
        validator.run(f"{kind}_keys", whole[1:], _key_frame(list(index), files, numbers, keys, suite.key), {})

    # The pages first: they must also be there when a violation is raised.
    validator.write_docs()
    _describe_keys(paths, suite.key, whole[1:])
    _raise_violations(paths, [*tallies, *whole], docs)
    return {
        "kind": kind,
        "files": [path.name for path in paths],
        "rows": len(numbers),
        "expectations": [_passed(t) for t in [*tallies, *whole]],
    }


def _passed(tally: _Tally) -> Row:
    rule = tally.rule
    return {
        "expectation": rule.expectation,
        "column": rule.column,
        "meaning": rule.meaning,
        "rows": tally.num_rows,
        "success": True,
    }


def _raise_violations(paths: Sequence[Path], tallies: Sequence[_Tally], docs: Path) -> None:
    lines = [line for tally in tallies for line in _violations(paths, tally)]
    if lines:
        more = f"Correct the rows, or the stage that wrote them. Details: {docs / 'index.html'}"
        raise DataError("\n".join([*lines, more]))


def _violations(paths: Sequence[Path], tally: _Tally) -> Iterator[str]:
    """One line for each file of the examples."""
    rule = tally.rule
    if tally.crash:
        files = ", ".join(map(str, paths))
        yield f"{files}: column {rule.column!r}: the rule {rule.expectation} could not be checked: {tally.crash}"
        return
    left = tally.num_broken - len(tally.examples)
    last = tally.examples[-1][0][0] if tally.examples else ""
    if left and not last:
        yield f"{', '.join(map(str, paths))}: expected {rule.meaning} ({rule.expectation})."
    for file, examples in itertools.groupby(tally.examples, key=lambda example: example[0][0]):
        places, values = zip(*examples, strict=True)
        if rule.column == _ROWS:
            yield f"{file}: expected {rule.meaning} ({rule.expectation})."
            continue
        numbers = ", ".join(str(number) for _, number in places)
        more = f" and {left} more" + ("" if len(paths) == 1 else ", here or in later files")
        where = f"{file}: row {numbers}{more if left and file == last else ''}: column {rule.column!r}"
        yield f"{where}: found {', '.join(dict.fromkeys(values))}, expected {rule.meaning} ({rule.expectation})."


# The suites. A cell is None where the field has the wrong kind of value, so that a rule can point at it.


def _filled(column: str, meaning: str = "text that is not blank") -> Rule:
    return Rule("ExpectColumnValuesToNotBeNull", {"column": column}, meaning)


def _absent(column: str, meaning: str) -> Rule:
    return Rule("ExpectColumnValuesToBeNull", {"column": column}, meaning)


def _one_of(column: str, values: Sequence[object]) -> Rule:
    meaning = f"one of {', '.join(map(repr, values))}"
    return Rule("ExpectColumnValuesToBeInSet", {"column": column, "value_set": list(values)}, meaning)


def _between(column: str, low: float, high: float | None = None, meaning: str = "") -> Rule:
    arguments = {"column": column, "min_value": low, "max_value": high}
    default = f"{low} or more" if high is None else f"a number from {low} to {high}"
    return Rule("ExpectColumnValuesToBeBetween", arguments, meaning or default)


def _at_least(column: str, other: str) -> Rule:
    arguments = {"column_A": column, "column_B": other, "or_equal": True, "ignore_row_if": "either_value_is_missing"}
    return Rule("ExpectColumnPairValuesAToBeGreaterThanB", arguments, f"{column} not below {other}")


def _when(rule: Rule, condition: str, meaning: str) -> Rule:
    extra = {"row_condition": condition, "condition_parser": "pandas"}
    return Rule(rule.expectation, rule.arguments | extra, meaning)


def _whole_rules(key: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules that need all rows: each file has at least one, and no key appears twice."""
    some = _between(_ROWS, 1, meaning="at least one row")
    unique = Rule("ExpectColumnValuesToBeUnique", {"column": "/".join(key)}, "no value twice in the file")
    return (some, unique) if key else (some,)


def _questions(corpus_keys: np.ndarray | None) -> Suite:
    def cells(row: Row) -> Cells:
        fault = _fault(to_question, row)
        return {
            "schema_fault": fault,
            "unknown_passage_id": None if fault else _unknown_passage(_named(row), corpus_keys),
        }

    rules = (
        _absent("schema_fault", "a row as tasks/types.py (Question) and tasks/data/records.py describe it"),
        _absent("unknown_passage_id", "only ids of passages in the corpus"),
    )
    return Suite(cells, rules, ("id",))


def _named(row: Row) -> list[str]:
    """The passage ids in a row of a question."""
    support = [hop.get("support_passage_id") for hop in row.get("decomposition", [])]
    named = [*row.get("gold_passage_ids", []), *row.get("silver_passage_ids", []), *support]
    return [name for name in named if name is not None]


def _passages(_: np.ndarray | None) -> Suite:
    rule = _absent("schema_fault", "a row as tasks/types.py (Passage) and tasks/data/records.py describe it")
    return Suite(lambda row: {"schema_fault": _fault(to_passage, row)}, (rule,), ("id",))


def _fault(read: Callable[[Row, str], object], row: Row) -> str | None:
    """Why a row cannot be read."""
    try:
        read(row, "")
    except DataError as error:
        return str(error).removeprefix(": ").removesuffix(" Correct the row.")
    return None


def _augmented(corpus_keys: np.ndarray | None) -> Suite:
    def cells(row: Row) -> Cells:
        hops = _objects(row.get("hops"))
        support = [hop.get("support_passage_id") for hop in hops or []]
        return {
            "question_id": _text(row.get("question_id")),
            "hops": None if hops is None else len(hops),
            "hop_fault": _hops_fault(hops or []),
            "unknown_passage_id": _unknown_passage([one for one in support if isinstance(one, str)], corpus_keys),
            "unknown_field": next((name for name in row if name not in ("question_id", "hops")), None),
        }

    rules = (
        _filled("question_id"),
        _filled("hops", "a list of objects"),
        _between("hops", 1, MAX_HOPS),
        _absent("hop_fault", "hops with resolved texts and different queries"),
        _absent("unknown_passage_id", "only ids of passages in the corpus"),
        _absent("unknown_field", "only the fields question_id, hops"),
    )
    return Suite(cells, rules, ("question_id",))


def _labels(_: np.ndarray | None) -> Suite:
    def cells(row: Row) -> Cells:
        fault = schema.fault(LabelRow, row)
        labels = [] if fault else row["labels"]
        return {
            "schema_fault": fault,
            "status": None if fault else row["status"],
            "answer": None if fault else row["answer"],
            "hops": None if fault else row["hops"],
            "pivots": None if fault else labels.count("+"),
            "label_fault": None if fault else _labels_fault(row),
        }

    rules = (
        _absent("schema_fault", "a row as tasks/records/played.py (LabelRow) describes it"),
        _absent("label_fault", "as many labels as executed searches, and no right answer without an answer"),
        _at_least("hops", "pivots"),
        _one_of("status", ("answered", "open", "overflow")),
        _when(_filled("answer"), 'status == "answered"', "an answer where status is answered"),
    )
    return Suite(cells, rules, ("question_id", "copy"))


def _labels_fault(row: Row) -> str | None:
    """The contradiction between the fields of a labelled trajectory, in words."""
    searches = sum(turn["executed"] for turn in row["turns"])
    if searches != len(row["labels"]):
        return f"{len(row['labels'])} labels for {searches} searches"
    return "is_right without an answer" if row["is_right"] and row["answer"] is None else None


def _trajectories(_: np.ndarray | None) -> Suite:
    def cells(row: Row) -> Cells:
        fault = schema.fault(TrajectoryRow, row)
        return {
            "schema_fault": fault,
            "status": None if fault else row["status"],
            "answer": None if fault else row["answer"],
            "turn_fault": None if fault else _turns_fault(row["turns"]),
        }

    rules = (
        _absent("schema_fault", "a row as tasks/records/trajectories.py describes it"),
        _when(_filled("answer"), 'status == "answered"', "an answer where status is answered"),
        _absent("turn_fault", "turns whose tokens, logprobs and advantages agree"),
    )
    return Suite(cells, rules, ())


def _results(_: np.ndarray | None) -> Suite:
    names = (
        "split", "em", "f1", "subem", "searches", "actions", "valid_actions", "answer_in_passage", "answer_shown",
        "status",
    )  # fmt: skip

    def cells(row: Row) -> Cells:
        fault = schema.fault(ScoreRow, row)
        return {"schema_fault": fault, **{name: None if fault else row[name] for name in names}}

    rules = (
        _absent("schema_fault", "a row as tasks/records/scores.py describes it"),
        _one_of("split", ("dev", "test")),
        _at_least("actions", "valid_actions"),
        _at_least("valid_actions", "searches"),
        _at_least("f1", "em"),
        _at_least("subem", "em"),
        _at_least("answer_in_passage", "answer_shown"),
        _when(_one_of("em", (0.0,)), 'status == "failed"', "0 where status is failed"),
    )
    return Suite(cells, rules, ("question_id", "mode"))


_SUITES: dict[Kind, Callable[[np.ndarray | None], Suite]] = {
    "questions": _questions,
    "passages": _passages,
    "augmented": _augmented,
    "labels": _labels,
    "trajectories": _trajectories,
    "results": _results,
}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _texts(value: object) -> list[str] | None:
    return value if isinstance(value, list) and all(map(_text, value)) else None


def _objects(value: object) -> list[Row] | None:
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


def _exact(value: object, kind: type) -> object:
    """The value, or its text if it has another type, so that `true` does not count as 1 and null is noticed."""
    return value if type(value) is kind else f"{value!r} ({type(value).__name__})"


def _unknown_passage(names: list[str], corpus_keys: np.ndarray | None) -> str | None:
    if corpus_keys is None:
        return None
    return next((name for name in names if not contains(corpus_keys, key_of(name))), None)


def _hops_fault(hops: list[Row]) -> str | None:
    faults = (f"hop {i}: {fault}" for i, hop in enumerate(hops, 1) if (fault := _hop_fault(hop)))
    return next(faults, None)


def _hop_fault(hop: Row) -> str | None:
    """The fault of one hop of `hops.jsonl`, in words."""
    if unknown := sorted(hop.keys() - set(known_fields(Hop))):
        return f"unknown field {unknown[0]!r}"
    for name in ("question", "answer"):
        if not (text := _text(hop.get(name))) or not normalize(text):
            return f"{name} {hop.get(name)!r}"
    if not isinstance(hop.get("support_passage_id", 0), str | None):
        return f"support_passage_id {hop.get('support_passage_id', 'missing')!r}"
    queries = _texts(hop.get("queries"))
    if queries is None:
        return "queries is not a list of texts"
    if len(set(map(normalize, queries))) < len(queries) or not all(map(normalize, queries)):
        return "a blank query, or one twice"
    if left := next((text for text in (hop["question"], hop["answer"], *queries) if REFERENCE.search(text)), None):
        return f"unresolved {left!r}"
    return None


def _turns_fault(turns: list[Row]) -> str | None:
    faults = (f"turn {i}: {fault}" for i, turn in enumerate(turns) if (fault := _turn_fault(turn)))
    return next(faults, None)


def _turn_fault(turn: Row) -> str | None:
    """The contradiction between fields of one turn, in words."""
    tokens, kind = turn["tokens"], turn["kind"]
    if (tokens is None) is (turn.get("text") is None):
        return "text is given where tokens are null, and only there"
    for name in ("logprobs", "advantages"):
        values = turn[name]
        if values is not None and len(values) != len(tokens or ()):
            return f"{len(tokens or ())} tokens but {len(values)} {name}"
    if turn["executed"] and kind != "search":
        return f"executed True of kind {kind!r}"
    return None


# Frames and Great Expectations.


def _frame(batch: list[tuple[Place, Row]], cells: Callable[[Row], Cells]) -> pandas.DataFrame:
    import pandas

    columns = [cells(row) for _, row in batch]
    table = {name: pandas.Series([one[name] for one in columns], dtype=object) for name in columns[0]}
    for name, series in table.items():
        if all(value is None or type(value) in (int, float) for value in series):
            table[name] = series.astype(float)
    files, numbers = zip(*(place for place, _ in batch), strict=True)
    return pandas.DataFrame({"file": files, "row": numbers, **table})


def _file_frame(names: list[str], files: array[int]) -> pandas.DataFrame:
    """One line for each file; row 0 means the file as a whole."""
    import pandas

    counts = np.bincount(np.frombuffer(files, np.int32), minlength=len(names))
    return pandas.DataFrame({"file": names, "row": 0, _ROWS: counts})


def _key_frame(
    names: list[str], files: array[int], numbers: array[int], keys: array[int], key: tuple[str, ...]
) -> pandas.DataFrame:
    import pandas

    file = pandas.Categorical.from_codes(np.frombuffer(files, np.int32), pandas.Index(names))
    hashes = np.frombuffer(keys, np.uint64)
    return pandas.DataFrame({"file": file, "row": np.frombuffer(numbers, np.uint64), "/".join(key): hashes})


def _corpus_keys(path: Path) -> np.ndarray:
    keys = np.frombuffer(array("Q", (key_of(str(row.get("id"))) for _, row in read_jsonl(path))), np.uint64).copy()
    keys.sort()
    return keys


def _describe_keys(paths: Sequence[Path], key: tuple[str, ...], tallies: list[_Tally]) -> None:
    """Replace the hashes in the examples by the key values of their rows."""
    wanted = {place for tally in tallies for place, _ in tally.examples}
    files = {file for file, _ in wanted}
    found: dict[Place, str] = {}
    for path in (path for path in paths if str(path) in files):
        rows = (((str(path), number), row) for number, row in read_jsonl(path))
        found |= {place: ", ".join(shown(row.get(k)) for k in key) for place, row in rows if place in wanted}
    for tally in tallies:
        tally.examples = [(place, found[place]) for place, _ in tally.examples]


class _Validator:
    """One ephemeral Great Expectations context, without telemetry, progress bars or log noise."""

    def __init__(self, docs: Path) -> None:
        os.environ["GX_ANALYTICS_ENABLED"] = "false"
        import great_expectations as gx
        from great_expectations.data_context.types import base

        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        shutil.rmtree(docs, ignore_errors=True)
        docs.mkdir(parents=True)
        settings = base.DataContextConfig(
            store_backend_defaults=base.InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
            data_docs_sites={"docs": _site(docs)},
            progress_bars=base.ProgressBarsConfig(globally=False),
            analytics_enabled=False,
        )
        self.gx, self.context = gx, gx.get_context(mode="ephemeral", project_config=settings)
        asset = self.context.data_sources.add_pandas("files").add_dataframe_asset("rows")
        self.batch = asset.add_batch_definition_whole_dataframe("batch")
        self.definitions: dict[str, Any] = {}

    def run(self, name: str, tallies: list[_Tally], frame: pandas.DataFrame, rows: dict[Place, Row]) -> None:
        """Check `frame` against the rules of `tallies` and add the outcome to them.

        Args:
            name: the suite's name in the Data Docs.
            tallies: one per rule.
            frame: one line per row; columns `file` and `row` tell its place.
            rows: the raw rows by place, to show found values; the frame's values are shown for others.
        """
        form = {
            "result_format": "SUMMARY",
            "unexpected_index_column_names": ["file", "row"],
            "partial_unexpected_count": _EXAMPLES,
            "return_unexpected_index_query": False,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            definition = self._definition(name, tallies)
            report = definition.run(batch_parameters={"dataframe": frame}, result_format=form)
        for result in report.results:
            tally = tallies[result.expectation_config.meta["rule"]]
            tally.num_rows += len(frame)
            if not result.success:
                _add_failure(tally, result, rows)

    def write_docs(self) -> None:
        """Write the pages of every run so far."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.context.build_data_docs()

    def _definition(self, name: str, tallies: list[_Tally]) -> Any:
        if name not in self.definitions:
            expectations = [
                getattr(self.gx.expectations, tally.rule.expectation)(**tally.rule.arguments, meta={"rule": i})
                for i, tally in enumerate(tallies)
            ]
            suite = self.context.suites.add(self.gx.ExpectationSuite(name=name, expectations=expectations))
            definition = self.gx.ValidationDefinition(name=name, data=self.batch, suite=suite)
            self.definitions[name] = self.context.validation_definitions.add(definition)
        return self.definitions[name]


def _site(docs: Path) -> Any:
    return {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }


def _add_failure(tally: _Tally, result: Any, rows: dict[Place, Row]) -> None:
    crash = result.exception_info.get("exception_message") if isinstance(result.exception_info, dict) else None
    if crash:
        tally.crash = str(crash)
        return
    tally.num_broken += int(result.result.get("unexpected_count", 1))
    columns = tally.rule.column.split("/")
    for line in result.result.get("partial_unexpected_index_list") or []:
        if len(tally.examples) < _EXAMPLES:
            place = (str(line["file"]), int(line["row"]))
            raw = rows.get(place, {})
            found = [shown(raw[name]) if name in raw else _cell(line.get(name), name in _DERIVED) for name in columns]
            tally.examples.append((place, " and ".join(found)))


_DERIVED = frozenset({"unknown_passage_id", "unknown_field", "hop_fault", "label_fault", "turn_fault", "schema_fault"})


def _cell(value: object, is_derived: bool) -> str:
    return shown(value, 100) if is_derived else "nothing"
