"""The suites in front of the stages: what a violation says, that batches do not matter, that real data passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.data.expectations import Kind, check
from tasks.store import DataError, read_json
from tests.data.rows import Row, lines, passage, question

SCORE: Row = {
    "question_id": "d/1", "dataset": "d", "split": "test", "hops": 2, "type": None, "mode": "greedy", "em": 1.0,
    "f1": 1.0, "subem": 1.0, "searches": 1, "actions": 2, "valid_actions": 2, "recall": 0.5, "status": "answered",
    "answer_in_passage": 1.0, "answer_shown": 1.0,
    "generated_tokens": 9, "prefill_tokens": 20, "answer": "Name",
}  # fmt: skip
TURN: Row = {
    "kind": "search", "content": "x", "executed": True, "reward": 0.0, "tokens": ["<search>", "x"],
    "advantages": [0.5, 0.5], "logprobs": [-0.1, 0.0], "observation": "", "hits": [],
}  # fmt: skip
PLAYED: Row = {
    "question_id": "d/1", "question": "Who?", "answers": ["X"], "gold_passage_ids": [], "dataset": "d", "hops": 1,
    "policy": "base", "seed": 0, "step": None, "mode": "sampled", "status": "answered", "answer": "X", "prompt": "Q",
    "outcome": 1.0, "turns": [TURN],
}  # fmt: skip
HOP: Row = {"question": "Who?", "answer": "X", "support_passage_id": None, "queries": ["who", "which one"]}
HOPS: Row = {"question_id": "d/1", "hops": [HOP, HOP | {"support_passage_id": "p1", "queries": []}]}
SEARCH: Row = {
    "kind": "search", "content": "x", "queries": [], "text": "so", "observation": "y", "executed": True,
}  # fmt: skip
LABELLED: Row = {
    "question_id": "d/1", "question": "Who?", "copy": 0, "part": "train", "status": "answered", "answer": "X",
    "is_right": True, "hops": 2, "golden": ["Who? A", "Of A? B"],
    "labels": ["+", "-"], "reason": "", "turns": [SEARCH, SEARCH],
}  # fmt: skip
VALID: dict[Kind, Row] = {
    "questions": question(1), "passages": passage(1), "augmented": HOPS, "results": SCORE, "trajectories": PLAYED,
    "labels": LABELLED,
}  # fmt: skip


@pytest.fixture
def run_check(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Write rows (or text) to a file and check it."""

    def run(kind: Kind, rows: list[Row] | str, **more: Any) -> dict[str, Any]:
        path = tmp_path / f"{kind}.jsonl"
        path.write_text(rows if isinstance(rows, str) else lines(rows), encoding="utf-8")
        return check(kind, [path], tmp_path / "docs", **more)

    return run


@pytest.mark.parametrize("kind", VALID)
def test_valid_rows_pass(kind: Kind, run_check: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = run_check(kind, [VALID[kind]])
    assert (result["kind"], result["files"], result["rows"]) == (kind, [f"{kind}.jsonl"], 1)
    assert all(one["success"] and one["rows"] == 1 for one in result["expectations"])
    pages = [path.read_text() for path in (tmp_path / "docs" / kind).rglob("*.html")]
    assert any("index" in page.lower() and kind in page for page in pages)


SCHEMA = "a row as tasks/records/"
QUESTION, PASSAGE = (f"a row as tasks/types.py ({name})" for name in ("Question", "Passage"))
# For each kind: a change of one field, then the column, the found value and the rule that the message must name.
VIOLATIONS: dict[Kind, list[tuple[Row, str, str, str]]] = {
    "questions": [
        ({"answers": []}, "schema_fault", "field 'answers': found [], expected a list of at least 1", QUESTION),
        ({"answers": ["---"]}, "schema_fault", "field 'answers': found ['---'], expected an answer with a", QUESTION),
        ({"hops": "2"}, "schema_fault", "field 'hops': found '2', expected a whole number", QUESTION),
        ({"hops": True}, "schema_fault", "field 'hops': found True, expected a whole number", QUESTION),
        ({"hops": 9}, "schema_fault", "field 'hops': found 9 (int), expected 4 or less", QUESTION),
        ({"question": 12}, "schema_fault", "field 'question': found 12 (int), expected text", QUESTION),
        ({"split": None}, "schema_fault", "field 'split': found None, expected 'train', 'dev' or 'test'", QUESTION),
        ({"anwsers": ["x"]}, "schema_fault", "unknown field 'anwsers'. Did you mean 'answers'?", QUESTION),
        (
            {"gold_passage_ids": [], "gold_complete": True},
            "schema_fault",
            "because gold_passage_ids is empty",
            QUESTION,
        ),
        (
            {"gold_complete": 1},
            "schema_fault",
            "field 'gold_complete': found 1 (int), expected true or false",
            QUESTION,
        ),
        (
            {"decomposition": [{"answer": "a"}]},
            "schema_fault",
            "decomposition[0]: field 'question' is missing",
            QUESTION,
        ),
    ],
    "passages": [
        ({"text": ""}, "schema_fault", "field 'text': found '', expected text that is not blank", PASSAGE),
        ({"title": None}, "schema_fault", "field 'title': found None, expected text", PASSAGE),
        ({"datasets": "d"}, "schema_fault", "field 'datasets': found 'd', expected a list", PASSAGE),
        ({"body": "x"}, "schema_fault", "unknown field 'body'", PASSAGE),
    ],
    "augmented": [
        ({"hops": "x"}, "hops", "'x'", "a list of objects"),
        ({"hops": []}, "hops", "[]", "a number from 1 to 4"),
        ({"hops": [HOP | {"answer": "the"}]}, "hop_fault", "\"hop 1: answer 'the'\"", "hops with"),
        ({"hops": [HOP, HOP | {"question": "of #1"}]}, "hop_fault", "hop 2: unresolved 'of #1'", "hops with"),
        ({"hops": [HOP | {"queries": ["Who", "who?"]}]}, "hop_fault", "a blank query, or one twice", "hops with"),
        ({"hops": [HOP | {"queries": None}]}, "hop_fault", "queries is not a list of texts", "hops with"),
        ({"hops": [HOP | {"support_passage_id": 3}]}, "hop_fault", "support_passage_id 3", "hops with"),
        ({"split": "train"}, "unknown_field", "'split'", "only the fields question_id, hops"),
    ],
    "results": [
        ({"em": 0.5}, "schema_fault", "em: found 0.5 (float), expected 0 or 1", SCHEMA),
        ({"f1": float("nan")}, "schema_fault", "f1: found nan (float), expected a finite number", SCHEMA),
        ({"hops": True}, "schema_fault", "hops: found True, expected a whole number", SCHEMA),
        ({"split": "train"}, "split", "'train'", "one of 'dev', 'test'"),
        ({"status": "failed"}, "em", "1.0 (float)", "0 where status is failed"),
        ({"valid_actions": 3}, "actions/valid_actions", "2 (int) and 3 (int)", "actions not below valid_actions"),
        ({"recall": 1.5}, "schema_fault", "recall: found 1.5 (float), expected 1.0 or less", SCHEMA),
        ({"searches": -1}, "schema_fault", "searches: found -1 (int), expected 0 or more", SCHEMA),
    ],
    "trajectories": [
        ({"turns": [TURN | {"logprobs": [-1.0]}]}, "turn_fault", "'turn 0: 2 tokens but 1 logprobs'", "turns whose"),
        (
            {"turns": [TURN, TURN | {"logprobs": [0.1, 0.0]}]},
            "schema_fault",
            "turns[1].logprobs[0]: found 0.1 (float), expected 0.0001",
            SCHEMA,
        ),
        (
            {"turns": [TURN | {"tokens": None}]},
            "turn_fault",
            "turn 0: text is given where tokens are null",
            "turns whose",
        ),
        ({"turns": [TURN | {"kind": "answer"}]}, "turn_fault", "turn 0: executed True of kind 'answer'", "turns whose"),
        ({"turns": None}, "schema_fault", "turns: found None, expected a list", SCHEMA),
        ({"answer": None}, "answer", "None", "an answer where status is answered"),
        ({"outcome": None}, "schema_fault", "outcome: found None, expected a number", SCHEMA),
        ({"step": -2}, "schema_fault", "step: found -2 (int), expected 0 or more", SCHEMA),
    ],
}


FIVES = [(kind, at) for kind, violations in VIOLATIONS.items() for at in range(0, len(violations), 5)]


@pytest.mark.parametrize(("kind", "start"), FIVES)  # A line names five rows.
def test_a_violation_names_file_row_column_value_and_rule(
    kind: Kind, start: int, run_check: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    violations = VIOLATIONS[kind][start : start + 5]
    key = "question_id" if "question_id" in VALID[kind] else "id"
    bad = [{**VALID[kind], key: f"other {i}", **change} for i, (change, *_) in enumerate(violations)]
    with pytest.raises(DataError) as error:
        run_check(kind, [VALID[kind], *bad])
    *found_lines, last = str(error.value).split("\n")
    for number, (_, column, found, rule) in enumerate(violations, 2):
        pattern = rf": row (?:\d+, )*{number}(?:, \d+)*: column '{column}': found .*{re.escape(found)}.*, expected "
        assert any(re.search(pattern, line) and rule in line for line in found_lines), (pattern, rule, found_lines)
    assert all(line.startswith(f"{tmp_path / kind}.jsonl: row ") for line in found_lines)
    assert len(found_lines) == len({(column, rule.split(" (")[0]) for _, column, _, rule in violations})
    assert last.endswith(str(tmp_path / "docs" / kind / "index.html"))
    assert (tmp_path / "docs" / kind / "index.html").is_file()


@pytest.mark.parametrize("batch_rows", [2, 100])
def test_rows_are_counted_and_repeats_found_across_batches(
    run_check: Callable[..., dict[str, Any]], batch_rows: int
) -> None:
    rows = [question(n) for n in range(9)]
    assert run_check("questions", rows, batch_rows=batch_rows)["expectations"][0]["rows"] == 9
    bad = [*rows, question(0), *(question(n, hops=9) for n in range(10, 17))]
    with pytest.raises(DataError) as error:
        run_check("questions", bad, batch_rows=batch_rows)
    hops, repeats, _ = str(error.value).split("\n")
    assert (
        ": row 11, 12, 13, 14, 15 and 2 more: column 'schema_fault': found \"field 'hops': found 9 (int), expected"
        in hops
    )
    assert ": row 1, 10: column 'id': found 'd/0', expected no value twice in the file" in repeats


def test_result_does_not_depend_on_batches(run_check: Callable[..., dict[str, Any]]) -> None:
    rows = [passage(n) for n in range(7)]
    assert run_check("passages", rows, batch_rows=2) == run_check("passages", rows)


def test_results_may_hold_a_question_once_per_mode(run_check: Callable[..., dict[str, Any]]) -> None:
    run_check("results", [SCORE, SCORE | {"mode": "sampled"}])
    with pytest.raises(DataError, match=r"row 1, 2: column 'question_id/mode': found 'd/1', 'greedy'"):
        run_check("results", [SCORE, SCORE])


def test_several_files_are_checked_together_and_named_one_by_one(tmp_path: Path) -> None:
    """A key may repeat in another file; each must have a row."""
    paths = [tmp_path / f"{n}" / "scores.jsonl" for n in range(4)]
    contents = [[SCORE], [SCORE | {"em": 0.5, "question_id": f"d/{n}"} for n in range(4)], [SCORE, SCORE], []]
    for path, rows in zip(paths, contents, strict=True):
        path.parent.mkdir()
        path.write_text(lines(rows), encoding="utf-8")
    result = check("results", [paths[0], paths[0].parent / "../0/scores.jsonl"], tmp_path / "docs")
    assert (result["files"], result["rows"]) == (["scores.jsonl"] * 2, 2)
    with pytest.raises(DataError) as error:
        check("results", paths, tmp_path / "docs", batch_rows=3)
    half, empty, repeated, _ = str(error.value).split("\n")
    assert half.startswith(f"{paths[1]}: row 1, 2, 3, 4: column 'schema_fault': found 'em: found 0.5 (float), expect")
    assert empty.startswith(f"{paths[3]}: expected at least one row")
    assert repeated.startswith(f"{paths[2]}: row 1, 2: column 'question_id/mode': found 'd/1', 'greedy', expected no")
    paths[3].write_text(lines([SCORE | {"em": 0.5, "question_id": f"e/{n}"} for n in range(4)]), encoding="utf-8")
    with pytest.raises(DataError) as error:
        check("results", [paths[1], paths[3]], tmp_path / "docs")
    first, second, _ = str(error.value).split("\n")
    assert first.startswith(f"{paths[1]}: row 1, 2, 3, 4: column")
    assert second.startswith(f"{paths[3]}: row 1 and 3 more, here or in later files: column 'schema_fault'")


def test_ids_must_be_in_the_corpus(run_check: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(lines([passage(1)]))
    run_check("questions", [question(0)], corpus=corpus)
    with pytest.raises(DataError, match=r"row 2: column 'unknown_passage_id': found 'p7', expected only ids"):
        run_check("questions", [question(0), question(1, gold_passage_ids=["p7"])], corpus=corpus)


def test_empty_file(run_check: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"passages\.jsonl: expected at least one row"):
        run_check("passages", [])


def test_unreadable_row(run_check: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"passages\.jsonl: row 2: column 2: not JSON"):
        run_check("passages", lines([passage(0)]) + "{oops\n")


def test_importing_the_room_does_not_import_great_expectations() -> None:
    code = "import sys, tasks.data.expectations, tasks.data.settings; print('great_expectations' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "False\n"


def test_nothing_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_text(lines([passage(0)]))
    code = "import sys, pathlib as p; from tasks.data.expectations import check; "
    code += "check('passages', [p.Path(sys.argv[1])], p.Path(sys.argv[2]))"
    words = [sys.executable, "-c", code, str(path), str(tmp_path / "docs")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("", "")


def test_real_data_passes(real_data: Path, tmp_path: Path) -> None:
    manifest = read_json(real_data / "manifest.json")
    passages = check("passages", [real_data / "corpus.jsonl"], tmp_path)
    asked = check("questions", [real_data / "questions.jsonl"], tmp_path, corpus=real_data / "corpus.jsonl")
    assert passages["rows"] == manifest["files"]["corpus.jsonl"]["rows"]
    assert asked["rows"] == manifest["files"]["questions.jsonl"]["rows"]
    assert str(real_data) not in json.dumps([passages, asked])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["+"]}, "column 'label_fault': found '1 labels for 2 searches', expected as many labels as"),
        ({"labels": ["+", "yes"]}, "column 'schema_fault': found \"labels[1]: found 'yes', expected '+' or '-'\""),
        ({"labels": ["+", "+"], "hops": 1}, "column 'hops/pivots': found "),
        ({"answer": None, "is_right": False}, "column 'answer': found None, expected an answer where status is"),
        ({"answer": None, "status": "open"}, "column 'label_fault': found 'is_right without an answer'"),
        ({"status": "failed"}, "column 'status': found 'failed'"),
        ({"part": "test"}, "column 'schema_fault': found "),
    ],
)
def test_a_wrong_label_is_found(
    run_check: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        run_check("labels", [LABELLED, LABELLED | {"copy": 1} | changes])
    assert f"labels.jsonl: row 2: {message}" in str(caught.value)


def test_a_play_is_labelled_once(run_check: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"column 'question_id/copy': found .*, expected no value twice in the file"):
        run_check("labels", [LABELLED, LABELLED])
