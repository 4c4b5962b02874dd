"""The schema of questions and passages: what passes comes back unchanged, what does not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.ingest import find_corpus
from tasks.data.records import (
    UnscorableError,
    passage_row,
    question_row,
    read_passages,
    read_questions,
    to_passage,
    to_question,
)
from tasks.store import DataError, dump
from tasks.text import normalize
from tasks.types import Hop, Passage, Question
from tests.data.rows import lines, passage, question

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
ANSWERS = TEXTS.filter(normalize)
DATASETS = st.from_regex(r"[A-Za-z0-9éЖ名][ -~éЖ名]*", fullmatch=True).filter(
    lambda name: name.casefold() != "all" and name == name.strip()
)
HOPS = st.builds(
    Hop,
    question=TEXTS,
    answer=TEXTS,
    support_passage_id=st.none() | TEXTS,
    queries=st.lists(TEXTS, max_size=2).map(tuple),
)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Any question the schema allows."""
    ids = draw(st.lists(TEXTS, unique=True, max_size=5))
    cut = draw(st.integers(0, len(ids)))
    gold, silver = tuple(ids[:cut]), tuple(ids[cut:])
    return Question(
        id=draw(TEXTS),
        dataset=draw(DATASETS),
        split=draw(st.sampled_from(["train", "dev", "test"])),
        question=draw(TEXTS),
        answers=tuple(draw(st.lists(ANSWERS, min_size=1, max_size=3))),
        hops=draw(st.integers(1, 4)),
        type=draw(st.none() | TEXTS),
        decomposition=tuple(draw(st.lists(HOPS, max_size=3))),
        gold_passage_ids=gold,
        gold_method=draw(st.sampled_from(["annotated", "derived"])) if gold else "none",
        gold_complete=draw(st.booleans()) if gold else False,
        silver_passage_ids=silver,
        source=draw(st.just("") | TEXTS),
    )


@given(questions())
def test_question_round_trip(wanted: Question) -> None:
    assert to_question(json.loads(dump(question_row(wanted))), "here") == wanted


def test_joined_passages_are_no_column_of_questions() -> None:
    joined = Question("q", "d", "train", "Who?", ("a",), 1, gold_passages=(Passage("p", "", "text"),))
    row = question_row(joined)
    assert "gold_passages" not in row
    with pytest.raises(DataError, match=r"here: unknown field 'gold_passages'\."):
        to_question({**row, "gold_passages": []}, "here")


@given(st.builds(Passage, id=TEXTS, title=st.just("") | TEXTS, text=TEXTS, datasets=st.lists(DATASETS).map(tuple)))
def test_passage_round_trip(wanted: Passage) -> None:
    assert to_passage(json.loads(dump(passage_row(wanted))), "here") == wanted


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_value_is_accepted_or_refused_with_its_field_named(value: Any) -> None:
    for name in question(0):
        message = ""
        try:
            to_question(question(0) | {name: value}, "file.jsonl: row 7")
        except DataError as error:
            message = str(error)
        assert message.startswith("file.jsonl: row 7: field") or not message


def test_defaults_fill_optional_fields() -> None:
    row = {"id": "a", "dataset": "d", "split": "dev", "question": "Who?", "answers": ["X"], "hops": 2}
    assert to_question(row, "here") == Question("a", "d", "dev", "Who?", ("X",), 2)


def test_answers_that_normalise_to_nothing_leave_while_another_remains() -> None:
    assert to_question(question(0, answers=["*", "the symbol", "The"]), "here").answers == ("the symbol",)
    with pytest.raises(UnscorableError, match=r"here: field 'answers': found \['---', 'The'\]"):
        to_question(question(0, answers=["---", "The"]), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, r"field 'answers': found \[\], expected a list of at least 1"),
        ({"answers": "X"}, r"field 'answers': found 'X', expected a list"),
        ({"answers": ["X", 3]}, r"field 'answers\[1\]': found 3 \(int\), expected text"),
        ({"answers": ["X", " "]}, r"field 'answers\[1\]': found ' ', expected text that is not blank"),
        ({"question": ""}, r"field 'question': found '', expected text that is not blank"),
        ({"question": None}, r"field 'question': found None, expected text"),
        ({"question": "\ud800?"}, r"field 'question': found '\\ud800\?', expected text without lone surrogates"),
        ({"id": 5}, r"field 'id': found 5 \(int\), expected text"),
        ({"hops": 5}, r"field 'hops': found 5 \(int\), expected 4 or less"),
        ({"hops": 0}, r"field 'hops': found 0 \(int\), expected 1 or more"),
        ({"hops": True}, r"field 'hops': found True"),
        ({"hops": 2.0}, r"field 'hops': found 2.0 \(float\)"),
        ({"hops": "2"}, r"field 'hops': found '2'"),
        ({"split": "validation"}, r"field 'split': found 'validation', expected 'train', 'dev' or 'test'"),
        ({"split": ["dev"]}, r"field 'split': found \['dev'\]"),
        ({"anwsers": ["X"]}, r"unknown field 'anwsers'. Did you mean 'answers'\?"),
        ({"gold_passages": []}, r"unknown field 'gold_passages'. Did you mean 'gold_passage_ids'\?"),
        ({"source": "\udfff"}, r"field 'source': found '\\udfff', expected text without lone surrogates"),
        ({"dataset": "\x1c\u3000"}, r"field 'dataset': found '\\x1c\\u3000', expected text that is not blank"),
        ({"gold_complete": "yes"}, r"field 'gold_complete': found 'yes', expected true or false"),
        ({"colour": "red"}, r"unknown field 'colour'. Remove it; known fields: id, dataset"),
        ({"gold_passage_ids": ["p1", "p1"]}, r"field 'gold_passage_ids': found 'p1', expected different ids"),
        ({"gold_passage_ids": [1]}, r"field 'gold_passage_ids\[0\]': found 1 \(int\)"),
        ({"gold_passage_ids": [], "gold_complete": True}, r"field 'gold_complete': found True, expected false"),
        ({"gold_method": "none"}, r"field 'gold_method': found 'none', expected 'annotated' or 'derived'"),
        ({"gold_method": "guess"}, r"field 'gold_method': found 'guess'"),
        ({"gold_complete": 1}, r"field 'gold_complete': found 1 \(int\), expected true or false"),
        ({"silver_passage_ids": ["p1"]}, r"field 'silver_passage_ids': found 'p1', expected no id that is in gold"),
        ({"decomposition": ["X"]}, r"field 'decomposition\[0\]': found 'X', expected a JSON object"),
        ({"decomposition": [{"question": "a"}]}, r"decomposition\[0\]: field 'answer' is missing"),
        ({"decomposition": [{"question": "a", "answer": "b", "quries": []}]}, r"Did you mean 'queries'\?"),
    ],
)
def test_bad_question(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=r"^q\.jsonl: row 3: .*" + message):
        to_question(question(0) | change, "q.jsonl: row 3")


@pytest.mark.parametrize("name", ["id", "dataset", "split", "question", "answers", "hops"])
def test_missing_field(name: str) -> None:
    row = question(0)
    del row[name]
    with pytest.raises(DataError, match=f"field '{name}' is missing. Add it"):
        to_question(row, "q.jsonl: row 3")


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(DataError, match=r"^here: fields 'dataset', 'split', 'answers', 'hops' are missing\. Add them"):
        to_question({"id": "a", "question": "Who?"}, "here")
    foreign = {"id": "a", "question": "Who?", "golden_answers": ["X"], "dataset": "d", "hops": 1}
    wanted = r"unknown field 'golden_answers'\. Did you mean 'answers'\? Also: fields 'split', 'answers' are missing"
    with pytest.raises(DataError, match=wanted):
        to_question(foreign, "here")
    with pytest.raises(DataError, match=r"'id': found 5 .* Also: field 'dataset' is missing\. Add it"):
        to_question({"id": 5, "question": "Who?", "split": "dev", "answers": ["X"], "hops": 1}, "here")


@pytest.mark.parametrize(
    "name",
    ["\x1b[31mred\x1b]0;PWNED\x07", "all", "All", '=HYPERLINK("http://x")', "@SUM(1+1)", "-1", "+1", "\tx", " nq",
     "a\nb", "a\u202eb", "a\x00b", "_nq", "'x",
     "All ", "nq ", "\uff21\uff4c\uff4c", "al\u2113"],
)  # fmt: skip
def test_a_name_that_no_dataset_may_have(name: str) -> None:
    wanted = "a printable name that begins with a letter or digit, ends in no blank and is not 'all'"
    with pytest.raises(DataError, match=f"field 'dataset': .*{wanted}"):
        to_question(question(0, dataset=name), "here")
    with pytest.raises(DataError, match=rf"field 'datasets\[1\]': .*{wanted}"):
        to_passage(passage(0, datasets=["d", name]), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": " "}, "field 'text': found ' ', expected text that is not blank"),
        ({"title": None}, "field 'title': found None, expected text"),
        ({"datasets": "d"}, "field 'datasets': found 'd', expected a list"),
        ({"txt": "x"}, "unknown field 'txt'. Did you mean 'text'"),
    ],
)
def test_bad_passage(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^c.jsonl: row 2: {message}"):
        to_passage(passage(0) | change, "c.jsonl: row 2")


def test_readers_stream_and_name_the_row(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(lines([question(0), question(1), question(2, hops=9)]), encoding="utf-8")
    stream = read_questions(path)
    assert [next(stream).id, next(stream).id] == ["d/0", "d/1"]
    with pytest.raises(DataError, match=r"questions\.jsonl: row 3: field 'hops'"):
        next(stream)


def test_real_rows_survive_a_round_trip(real_folder: Path) -> None:
    (path,) = (real_folder / "musique").iterdir()
    for wanted in read_questions(path):
        assert to_question(json.loads(dump(question_row(wanted))), "here") == wanted
    first = next(read_passages(find_corpus(real_folder)))
    assert to_passage(passage_row(first) | {"datasets": list(first.datasets)}, "here") == first


def test_everything_that_is_wrong_with_a_row_is_named_at_once() -> None:
    row = {"id": 5, "question": "Who?", "golden": ["X"], "split": "validation", "decomposition": [{"question": ""}]}
    with pytest.raises(DataError) as refused:
        to_question(row, "q.jsonl: row 3")
    assert str(refused.value).startswith("q.jsonl: row 3: unknown field 'golden'.")
    for words in (
        "Also: field 'id': found 5 (int), expected text",
        "Also: field 'split': found 'validation', expected 'train', 'dev' or 'test'",
        "Also: decomposition[0]: field 'answer' is missing",
        "Also: decomposition[0]: field 'question': found '', expected text that is not blank",
        "Also: fields 'dataset', 'answers', 'hops' are missing. Add them to the row.",
    ):
        assert words in str(refused.value)


def test_of_many_wrong_fields_the_first_are_named_and_the_others_counted() -> None:
    with pytest.raises(DataError) as refused:
        to_question(question(0, answers=list(range(9))), "here")
    assert str(refused.value).count("expected text") == 5
    assert str(refused.value).endswith("And 4 more faults.")
