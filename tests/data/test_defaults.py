"""Rows with the fewest fields, and rows as other projects write them; a forgotten field is not filled in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.data.defaults import split_of
from tasks.data.ingest import FolderConf, ingest
from tasks.data.records import read_passages, read_questions
from tasks.store import DataError, read_jsonl
from tasks.types import Passage
from tests.data.rows import Row, lines, passage, question

Make = Callable[..., Path]
FEWEST: list[Row] = [{"question": f"Who is number {n}?", "answers": [f"Name {n}"]} for n in range(40)]
TEXTS: list[Row] = [{"text": "Number 1 is Name 1."}, {"text": "Number 2 is Name 2."}]


def test_question_and_answers_and_text_are_enough(make_folder: Make, tmp_path: Path) -> None:
    manifest = ingest(make_folder(FEWEST, TEXTS), tmp_path / "out")
    found = list(read_questions(tmp_path / "out" / "questions.jsonl"))
    assert {q.id for q in found} == {f"given/line-{n + 1}" for n in range(40)}
    assert {(q.dataset, q.hops) for q in found} == {("given", 1)}
    assert all(q.split == split_of(q.question) for q in found)
    assert set(Counter(q.split for q in found)) == {"train", "dev", "test"}
    assert list(read_passages(tmp_path / "out" / "corpus.jsonl")) == [
        Passage("line-1", "", TEXTS[0]["text"]),
        Passage("line-2", "", TEXTS[1]["text"]),
    ]
    assert manifest["filled_in"] == {"corpus": {"id": 2, "title": 2}, "questions": {"hops": 40, "id": 40, "split": 40}}


def test_the_split_follows_the_text_and_nothing_else(make_folder: Make, tmp_path: Path) -> None:
    ingest(make_folder(FEWEST, TEXTS), tmp_path / "out")
    first = {q.question: q.split for q in read_questions(tmp_path / "out" / "questions.jsonl")}
    ingest(make_folder([{"question": "New?", "answers": ["x"]}, *FEWEST[::-1]], TEXTS), tmp_path / "out")
    second = {q.question: q.split for q in read_questions(tmp_path / "out" / "questions.jsonl")}
    assert {text: second[text] for text in first} == first
    assert split_of("Who is the Pope?") == split_of("who is pope")
    shares = Counter(split_of(f"question {n}") for n in range(10_000))
    assert 0.77 < shares["train"] / 10_000 < 0.83
    assert 0.08 < shares["dev"] / 10_000 < 0.12
    assert 0.08 < shares["test"] / 10_000 < 0.12


def test_rows_of_other_projects(make_folder: Make, tmp_path: Path) -> None:
    rows = [
        {"id": f"test_{n}", "question": row["question"], "golden_answers": row["answers"], "metadata": {"hop": n}}
        for n, row in enumerate(FEWEST)
    ]
    corpus = [
        {"id": "0", "contents": '"Bern"\nA city.'},
        {"id": "1", "contents": "Basel\nA city.\nOn the Rhine."},
        {"id": "2", "contents": "Only a text."},
        {"id": "3", "title": "Chur", "contents": "Chur\nis old."},
    ]
    manifest = ingest(make_folder(rows, corpus), tmp_path / "out")
    found = list(read_questions(tmp_path / "out" / "questions.jsonl"))
    assert {(q.id, q.answers) for q in found} == {(f"test_{n}", (f"Name {n}",)) for n in range(40)}
    assert list(read_passages(tmp_path / "out" / "corpus.jsonl")) == [
        Passage("0", "Bern", "A city."),
        Passage("1", "Basel", "A city.\nOn the Rhine."),
        Passage("2", "", "Only a text."),
        Passage("3", "Chur", "Chur\nis old."),
    ]
    assert manifest["filled_in"] == {"corpus": {}, "questions": {"hops": 40, "split": 40}}


def test_nothing_is_said_of_defaults_where_rows_are_complete(make_folder: Make, tmp_path: Path) -> None:
    assert "filled_in" not in ingest(make_folder(), tmp_path / "out")


@pytest.mark.parametrize("name", ["id", "split"])
def test_a_field_that_one_row_forgot_is_no_default(make_folder: Make, tmp_path: Path, name: str) -> None:
    rows = [question(n) for n in range(4)]
    del rows[2][name]
    with pytest.raises(DataError, match=rf"questions\.jsonl: row 3: field '{name}' is missing"):
        ingest(make_folder(rows), tmp_path / "out")


@pytest.mark.parametrize("name", ["id", "title"])
def test_a_passage_that_forgot_a_field(make_folder: Make, tmp_path: Path, name: str) -> None:
    rows = [passage(n) for n in range(3)]
    del rows[0][name]
    folder = make_folder([question(n, gold_passage_ids=[], gold_method="none") for n in range(4)], rows)
    with pytest.raises(DataError, match=rf"corpus\.jsonl: row 1: field '{name}' is missing"):
        ingest(folder, tmp_path / "out")
    ingest(folder, tmp_path / "out", FolderConf(faulty_rows="skip_and_report"))
    assert [one.id for one in read_passages(tmp_path / "out" / "corpus.jsonl")] == ["p1", "p2"]


def test_a_late_row_with_a_field_that_the_file_does_without(
    make_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.data.defaults.NUM_LOOKED_AT", 2)
    folder = make_folder(FEWEST, [*TEXTS, {"id": "p3", "text": "Late."}])
    with pytest.raises(DataError, match=r"row 3: field 'id': found 'p3', but the first rows of the file have none"):
        ingest(folder, tmp_path / "out")
    ingest(folder, tmp_path / "out", FolderConf(faulty_rows="skip_and_report"))
    assert [row["row"] for _, row in read_jsonl(tmp_path / "out" / "rejected.jsonl")] == [3]


def test_all_that_a_row_lacks_is_named_at_once(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder([{"query": "Who?", "label": "x"}, *FEWEST], TEXTS)
    with pytest.raises(DataError) as refused:
        ingest(folder, tmp_path / "out")
    for words in ("unknown field 'query'", "unknown field 'label'", "fields 'question', 'answers' are missing"):
        assert words in str(refused.value)


def test_a_broken_first_row_is_named_as_before(make_folder: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl: row 1: column 2: not JSON"):
        ingest(make_folder(FEWEST, "{oops\n" + json.dumps(TEXTS[0]) + "\n"), tmp_path / "out")


def _sets(folder: Path, **names: list[Row]) -> Path:
    for name, rows in names.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "questions.jsonl").write_text(lines(rows), encoding="utf-8")
    (folder / "corpus.jsonl").write_text(lines(TEXTS), encoding="utf-8")
    return folder


def _numbered(first: int, split: str, count: int = 3) -> list[Row]:
    """As FlashRAG numbers its rows."""
    return [
        {"id": f"{split}_{n}", "split": split, "question": f"Who is {first + n}?", "golden_answers": [f"Name {n}"]}
        for n in range(count)
    ]


def test_an_id_of_several_datasets_is_named_apart(tmp_path: Path) -> None:
    nq, popqa = _numbered(0, "test") + _numbered(10, "train"), _numbered(20, "test", 5)
    manifest = ingest(_sets(tmp_path / "all", nq=nq, popqa=popqa), tmp_path / "out")
    found = [q.id for q in read_questions(tmp_path / "out" / "questions.jsonl")]
    assert found == sorted([*(f"nq/{r['id']}" for r in nq), *(f"popqa/{r['id']}" for r in popqa)])
    assert manifest["renamed_ids"] == {"repeated": 3, "example": "test_0"}
    ingest(_sets(tmp_path / "turned", nq=nq[::-1], popqa=popqa[::-1]), tmp_path / "again")
    assert (tmp_path / "out/questions.jsonl").read_bytes() == (tmp_path / "again/questions.jsonl").read_bytes()


def test_ids_that_differ_stay_as_they_are(tmp_path: Path) -> None:
    manifest = ingest(_sets(tmp_path / "all", nq=_numbered(0, "test"), mine=_numbered(9, "train")), tmp_path / "out")
    assert "renamed_ids" not in manifest
    assert {q.id for q in read_questions(tmp_path / "out" / "questions.jsonl")} >= {"test_0", "train_0"}


def test_an_id_of_train_in_one_set_and_of_test_in_another_is_no_leak(tmp_path: Path) -> None:
    train = [row | {"id": f"q{n}"} for n, row in enumerate(_numbered(0, "train"))]
    test = [row | {"id": f"q{n}"} for n, row in enumerate(_numbered(50, "test"))]
    manifest = ingest(_sets(tmp_path / "all", a=train, b=test), tmp_path / "out")
    assert manifest["files"]["questions.jsonl"]["rows"] == 6


@pytest.mark.parametrize("name", ["_data", "all", "(my) data", "a\tb"])
def test_a_folder_whose_name_is_none_of_a_dataset_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "questions.jsonl").write_text("\n".join(map(json.dumps, FEWEST)))
    (tmp_path / name / "corpus.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    with pytest.raises(DataError, match="no row names its dataset, so the folder's name") as caught:
        ingest(tmp_path / name, tmp_path / "out")
    assert 'Rename the folder, or give each row a "dataset".' in str(caught.value)


@pytest.mark.parametrize("named", [{}, {"dataset": "one"}])
def test_an_id_twice_in_one_dataset_is_still_refused(tmp_path: Path, named: Row) -> None:
    """Also where its rows stand in two files that name the same dataset."""
    rows = _numbered(0, "test") + _numbered(10, "train")
    other = [row | {"question": f"Other {row['question']}"} for row in rows]
    sets = {"nq": rows + other} if not named else {"a": [r | named for r in rows], "b": [r | named for r in other]}
    with pytest.raises(DataError, match=r"field 'id': found '\w+_0' again, first in .*row 1"):
        ingest(_sets(tmp_path / "all", **sets), tmp_path / "out")
