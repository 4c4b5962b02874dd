"""Two spellings of one text are one: in scores, in the search for leaks, between rows, and in retrieval."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import retrieval
from tasks.data.ingest import FolderConf, ingest
from tasks.data.records import read_passages, read_questions
from tasks.retrieval.encoders import SentenceEncoder
from tasks.retrieval.recall import holds
from tasks.store import DataError
from tasks.text import contains_words, exact_match, f1, normalize, spelled, substring_match
from tasks.types import Hit, Passage
from tests.data.rows import passage, question

HOUSE = Path(__file__).parents[2]
Make = Callable[..., Path]
SPELLINGS = {
    "umlaut": ("Wilhelm Ro\u0308ntgen", "Wilhelm R\u00f6ntgen"),
    "circumflex": ("the Rho\u0302ne", "the Rh\u00f4ne"),
    "the angstrom sign": ("Anders \u212bngstro\u0308m", "Anders \u00c5ngstr\u00f6m"),
    "Hangul from its letters": ("\u1109\u1165\u110b\u116e\u11af", "\uc11c\uc6b8"),
    "marks in another order": ("Nguye\u0302\u0303n q\u0323\u0307", "Nguy\u1ec5n q\u0307\u0323"),
    "the Greek question mark": ("what\u037e", "what;"),
    "dots on a capital I": ("I\u0307stanbul", "\u0130stanbul"),
}


@pytest.mark.parametrize(("apart", "together"), SPELLINGS.values(), ids=SPELLINGS)
def test_two_spellings_of_an_answer_are_one(apart: str, together: str) -> None:
    assert apart != together
    for one, other in ((apart, together), (together, apart)):
        assert exact_match(one, [other]) == f1(one, [other]) == substring_match(f"It is {one}.", [other]) == 1.0
        assert contains_words(f"He met {one} there.", other)
        assert holds(Hit("p", 1.0, one, ""), [normalize(other)])


@pytest.mark.parametrize(
    ("capital", "small"), [("J\u030cim", "\u01f0im"), ("H\u0331ayim", "\u1e96ayim"), ("W\u030aa", "\u1e98a")]
)
def test_a_capital_without_a_composed_letter_is_the_small_one_that_has_it(capital: str, small: str) -> None:
    assert exact_match(capital, [small]) == exact_match(small, [capital]) == 1.0
    assert normalize(normalize(capital)) == normalize(capital) == normalize(small)


@pytest.mark.parametrize(("left", "right"), [("10\u00b2", "102"), ("\ufb01sh", "fish"), ("Beyonc\u00e9", "Beyonce")])
def test_texts_that_only_look_alike_stay_apart(left: str, right: str) -> None:
    assert exact_match(left, [right]) == 0.0


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_composed_rows_are_written_as_they_were(make_folder: Make, tmp_path: Path, form: str) -> None:
    """Decomposed rows become the same files, and the manifest counts them."""

    def spell(text: str) -> str:
        return unicodedata.normalize(form, text)

    rows = [
        question(n, question=spell(f"Wo entspringt die Rh\u00f4ne {n}?"), answers=[spell("Z\u00fcrich")])
        for n in range(4)
    ]
    corpus = [
        passage(1, title=spell("Z\u00fcrich"), text=spell("Gro\u00dfe Stadt an der S\u00fcdk\u00fcste.")),
        passage(2),
    ]
    manifest = ingest(make_folder(rows, corpus), tmp_path / form)
    assert [q.answers for q in read_questions(tmp_path / form / "questions.jsonl")] == [("Z\u00fcrich",)] * 4
    assert next(read_passages(tmp_path / form / "corpus.jsonl")).title == "Z\u00fcrich"
    assert manifest.get("respelled") == (None if form == "NFC" else {"corpus": 1, "questions": 4})


def test_a_leak_in_another_spelling_is_one(make_folder: Make, tmp_path: Path) -> None:
    texts = ("where does the Rh\u00f4ne rise", "where does the Rho\u0302ne rise")
    rows = [question(n, question=text, answers=["Switzerland"]) for n, text in enumerate(texts)]
    with pytest.raises(DataError, match="is also an evaluation question"):
        ingest(make_folder(rows), tmp_path / "out")


def test_ids_and_names_in_two_spellings_are_one(make_folder: Make, tmp_path: Path) -> None:
    """A folder's name, which some file systems decompose, and the id of a passage."""
    corpus = [passage(1, id="Gene\u0300ve"), passage(2)]
    rows = [
        question(n, gold_passage_ids=["Gen\u00e8ve"], dataset=("Rho\u0302ne", "Rh\u00f4ne")[n // 2]) for n in range(4)
    ]
    manifest = ingest(make_folder(rows, corpus), tmp_path / "out")
    assert set(manifest["questions"]) == {"Rh\u00f4ne"}
    twice = [passage(1, id="Gene\u0300ve"), passage(2, id="Gen\u00e8ve")]
    with pytest.raises(DataError, match=r"row 2: field 'id': found 'Gen.ve' again, first in row 1"):
        ingest(make_folder(rows, twice), tmp_path / "out")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028", "\u2029", "\x85"])
@pytest.mark.parametrize("title", ['"Lyon"', '"Lyon" ', " Lyon\t", "Lyon"])
def test_a_line_may_end_as_it_likes(make_folder: Make, tmp_path: Path, end: str, title: str) -> None:
    corpus = [{"id": "0", "contents": f"{title}{end}Lyon is a city.{end}In France."}]
    rows = [question(n, gold_passage_ids=[], gold_method="none") for n in range(4)]
    ingest(make_folder(rows, corpus), tmp_path / "out")
    assert list(read_passages(tmp_path / "out" / "corpus.jsonl")) == [
        Passage("0", "Lyon", "Lyon is a city.\nIn France.")
    ]


def test_quotation_marks_of_a_title_and_a_mark_at_the_beginning_of_a_file(make_folder: Make, tmp_path: Path) -> None:
    corpus = [
        {"id": "0", "contents": '"""Heroes"" (song)"\nA song.'},
        {"id": "1", "contents": '""Heroes" (song)"\r\nB.'},
    ]
    folder = make_folder([question(n, gold_passage_ids=[], gold_method="none") for n in range(4)], corpus)
    for path in folder.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    ingest(folder, tmp_path / "out", FolderConf())
    assert {one.title for one in read_passages(tmp_path / "out" / "corpus.jsonl")} == {'"Heroes" (song)'}


@pytest.mark.parametrize("at", [0, 1])
def test_bm25_and_an_encoder_take_both_spellings(tmp_path: Path, at: int) -> None:
    corpus = [
        f'{{"id": "{n}", "title": "", "text": "{text} x"}}\n'
        for n, text in enumerate(("Wien", SPELLINGS["umlaut"][at]))
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(corpus), encoding="utf-8")
    retrieval.build(tmp_path / "corpus.jsonl", tmp_path / "index", retrieval.load_settings("bm25", HOUSE))
    index = retrieval.open_retriever(tmp_path / "index", tmp_path / "corpus.jsonl")
    assert [hits[0].passage_id for hits in index.search(list(SPELLINGS["umlaut"]), 1)] == ["1", "1"]

    encoder, asked = SentenceEncoder.__new__(SentenceEncoder), []
    encoder._model = type("Model", (), {"encode": lambda self, texts, **_: asked.extend(texts) or [[1.0]]})()
    encoder.encode([SPELLINGS["umlaut"][at]], 1)
    assert asked == [SPELLINGS["umlaut"][1]]


def test_the_spelling_is_stable() -> None:
    for apart, together in SPELLINGS.values():
        assert spelled(apart) == spelled(together) == spelled(spelled(apart))
        assert normalize(normalize(apart)) == normalize(apart)
