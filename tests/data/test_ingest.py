"""From a folder of data to `artifacts/data`: what is written, what is refused, what is left behind."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.data.ingest import FolderConf, contains, ingest, key_of, publish
from tasks.data.records import read_passages, read_questions
from tasks.store import DataError, sha256
from tests.data.rows import Row, lines, passage, question
from tests.skips import REAL_LIKE

Make = Callable[..., Path]


def test_writes_sorted_questions_the_corpus_and_a_manifest(make_folder: Make, tmp_path: Path) -> None:
    rows = [question(3), question(1, hops=2, gold_complete=True), question(2), question(0, gold_complete=True)]
    out = tmp_path / "out"
    manifest = ingest(make_folder(rows), out)
    assert [q.id for q in read_questions(out / "questions.jsonl")] == ["d/0", "d/1", "d/2", "d/3"]
    assert [p.id for p in read_passages(out / "corpus.jsonl")] == ["p0", "p1", "p2"]
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["kind"] == "folder"
    assert manifest["files"]["questions.jsonl"] == {"rows": 4, "sha256": sha256(out / "questions.jsonl")}
    assert manifest["files"]["corpus.jsonl"] == {"rows": 3, "sha256": sha256(out / "corpus.jsonl")}
    assert manifest["corpus"] == {"rows": 3, "by_dataset": {"d": 3}}
    counts = manifest["questions"]["d"]
    assert counts["rows"] == 4
    assert counts["splits"] == {"train": 2, "test": 2}
    assert counts["hops"] == {"1": 3, "2": 1}
    assert (counts["gold_complete"], counts["gold_complete_splits"]) == (2, {"train": 1, "test": 1})
    assert manifest["leakage"]["gold_passages_of_train_and_evaluation"] == 1
    assert sorted(path.name for path in out.iterdir()) == ["corpus.jsonl", "manifest.json", "questions.jsonl"]


def test_reads_subfolders_and_gzip_alike(make_folder: Make, tmp_path: Path) -> None:
    plain = ingest(make_folder(), tmp_path / "plain")
    packed = tmp_path / "packed"
    (packed / "d").mkdir(parents=True)
    (packed / "corpus.jsonl.gz").write_bytes(gzip.compress(lines([passage(n) for n in range(3)]).encode()))
    (packed / "questions.jsonl").write_text(lines([question(2), question(3)]))
    (packed / "d" / "questions.jsonl.gz").write_bytes(gzip.compress(lines([question(0), question(1)]).encode()))
    assert ingest(packed, tmp_path / "unpacked") == plain


def test_dataset_and_hops_may_be_left_out(make_folder: Make, tmp_path: Path) -> None:
    rows = [question(n) for n in range(4)]
    for row in rows:
        del row["dataset"], row["hops"]
    hop = {"question": "a", "answer": "b"}
    (below := make_folder(rows) / "nq").mkdir()
    chain = {"id": "nq/1", "split": "dev", "question": "Who?", "answers": ["X"], "decomposition": [hop, hop]}
    (below / "questions.jsonl").write_text(lines([chain]), encoding="utf-8")
    ingest(below.parent, tmp_path / "out")
    found = [(q.id, q.dataset, q.hops) for q in read_questions(tmp_path / "out" / "questions.jsonl")]
    assert found == [*((f"d/{n}", "given", 1) for n in range(4)), ("nq/1", "nq", 2)]


def test_ingest_of_its_own_output_changes_nothing(make_folder: Make, tmp_path: Path) -> None:
    first = ingest(make_folder(), tmp_path / "one")
    assert ingest(tmp_path / "one", tmp_path / "two") == first
    for name in ("questions.jsonl", "corpus.jsonl", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("questions", "corpus", "message"),
    [
        (lines([question(0)]) + "{oops\n", None, r"questions\.jsonl: row 2: column 2: not JSON"),
        ("[1]\n", None, r"questions\.jsonl: row 1: found list, expected a JSON object\. Write one object a"),
        ([question(0), question(1), question(0)], None, r"row 3: field 'id': found 'd/0' again, first in .*: row 1;"),
        ([question(1), question(1)], None, r"row 2: field 'id': found 'd/1' again, first in .*: row 1;"),
        ([question(0), question(1, answers=[])], None, r"row 2: field 'answers': found \[\]"),
        ([question(0, answers=["---"]), question(1)], None, r"row 1: field 'answers': .* Or set unscorable: drop"),
        ([question(0, hops="2")], None, r"row 1: field 'hops': found '2'"),
        ([question(0, anwsers=["x"])], None, r"unknown field 'anwsers'. Did you mean 'answers'\?"),
        ([question(0, gold_passage_ids=["p9"])], None, r"row 1: field 'gold_passage_ids': found 'p9', expected the id"),
        ([question(0, silver_passage_ids=["p9"])], None, r"field 'silver_passage_ids': found 'p9'"),
        (
            [question(0, decomposition=[{"question": "a", "answer": "b", "support_passage_id": "p9"}])],
            None,
            r"field 'decomposition.support_passage_id': found 'p9'",
        ),
        (None, [], r"corpus\.jsonl: no passage in it"),
        (
            None,
            [passage(0), passage(1), passage(0)],
            r"corpus\.jsonl: row 3: field 'id': found 'p0' again, first in row 1",
        ),
        (None, [passage(1, text=3)], r"corpus\.jsonl: row 1: field 'text': found 3 \(int\)"),
        ([], None, r"questions\.jsonl: no train row\. Add"),
        (
            lines([question(0)]) + '{"id": "d/1", "hops": 1, "hops": 2}\n',
            None,
            r"questions\.jsonl: row 2: key 'hops' appears more than once",
        ),
        (None, '{"id": "p0", "id": "p1"}\n', r"corpus\.jsonl: row 1: key 'id' appears more than once"),
        ([question(1)], None, r"questions\.jsonl: no train row\. Add questions with split train"),
        ([question(0)], None, r"questions\.jsonl: no dev or test row"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    make_folder: Make, tmp_path: Path, questions: Any, corpus: Any, message: str
) -> None:
    out = tmp_path / "out" / "data"
    with pytest.raises(DataError, match=message):
        ingest(make_folder(questions, corpus), out)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_earlier_result_survives_a_failure(make_folder: Make, tmp_path: Path) -> None:
    out = tmp_path / "out" / "data"
    ingest(make_folder(), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DataError):
        ingest(make_folder([question(0), question(1, hops=9)]), out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list((tmp_path / "out").iterdir()) == [out]


def test_bytes_that_are_not_utf8(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    (folder / "corpus.jsonl").write_bytes(lines([passage(0)]).encode() + b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl: row 2: byte 8 is not UTF-8"):
        ingest(folder, tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not gzip"])
def test_damaged_gzip(make_folder: Make, tmp_path: Path, damage: str) -> None:
    folder = make_folder()
    packed = gzip.compress(lines([passage(n) for n in range(500)]).encode())
    half = len(packed) // 2
    flipped = packed[:half] + bytes([packed[half] ^ 0xFF]) + packed[half + 1 :]
    data = {"truncated": packed[:half], "flipped": flipped, "not gzip": b"plain text"}[damage]
    (folder / "corpus.jsonl").unlink()
    (folder / "corpus.jsonl.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz: row \d+: "):
        ingest(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: not a folder\. Name one .* DATA=/path"):
        ingest(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "in").mkdir()
    both = r"expected corpus\.jsonl with the passages and questions\.jsonl with the questions, one JSON object a line"
    with pytest.raises(DataError, match=rf"no corpus\.jsonl or corpus\.jsonl\.gz\. Found an empty folder, {both}"):
        ingest(tmp_path / "in", tmp_path / "out")
    for name in ("a.csv", "b.csv", "c.csv", "d.csv", "questions.jsonl", "z.csv"):
        (tmp_path / "in" / name).touch()
    with pytest.raises(
        DataError,
        match=rf"Found a\.csv, b\.csv, c\.csv, d\.csv, questions\.jsonl and 1 more, {both}.* Add the passages\.",
    ):
        ingest(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "questions.jsonl").unlink()
    (tmp_path / "in" / "corpus.jsonl").write_text(lines([passage(0)]))
    with pytest.raises(
        DataError, match=rf"no questions\.jsonl\[\.gz\] here or in a subfolder\. Found .*{both}.* Add the questions\."
    ):
        ingest(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "corpus.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"both corpus\.jsonl and corpus\.jsonl\.gz"):
        ingest(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda path: path.mkdir(), "found a folder"),
        (
            lambda path: path.symlink_to(path.name),
            r"found a link that cannot be followed \(Too many levels of symbolic links\)",
        ),
        (lambda path: path.symlink_to("nowhere"), "found a link to 'nowhere', which does not exist"),
        (os.mkfifo, "found neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("name", ["questions.jsonl", "questions.jsonl.gz", "sub/questions.jsonl", "corpus.jsonl"])
def test_what_stands_where_a_file_should_is_named(
    make_folder: Make, tmp_path: Path, name: str, put: Callable[[Path], None], words: str
) -> None:
    path = make_folder() / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    put(path)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: {words}, expected a file"):
        ingest(tmp_path / "given", tmp_path / "out")


SAME_TEXT = [question(0), question(2), question(1, question="who is the number 0")]  # Same once normalised.
SAME_ID = [question(1, id="d/0"), question(0), question(2)]


@pytest.mark.parametrize(("rows", "train", "other"), [(SAME_TEXT, 1, 3), (SAME_ID, 2, 1)])
def test_leakage_stops_and_names_both_rows(
    make_folder: Make, tmp_path: Path, rows: list[Row], train: int, other: int
) -> None:
    with pytest.raises(DataError, match=rf": row {train}: .* is also an evaluation question: .*: row {other}\."):
        ingest(make_folder(rows), tmp_path / "out")


@pytest.mark.parametrize("rows", [SAME_TEXT, SAME_ID])
def test_leaked_train_rows_can_be_left_out_and_are_counted(make_folder: Make, tmp_path: Path, rows: list[Row]) -> None:
    manifest = ingest(make_folder(rows), tmp_path / "out", FolderConf(leakage="drop_train"))
    assert manifest["leakage"]["train_rows_dropped"] == ["d/0"]
    assert manifest["questions"]["d"]["splits"] == {"train": 1, "test": 1}
    kept = {q.split: q.question for q in read_questions(tmp_path / "out" / "questions.jsonl")}
    assert kept["train"] == "Who is number 2?"
    assert kept["test"] != "Who is number 0?"


def test_no_train_row_left_after_leakage(make_folder: Make, tmp_path: Path) -> None:
    rows = [question(0), question(1, question="Who is number 0?")]
    with pytest.raises(DataError, match="no train row is left after 1 that repeat evaluation questions were dropped"):
        ingest(make_folder(rows), tmp_path / "out", FolderConf(leakage="drop_train"))


def test_repeats_on_one_side_are_counted_not_refused(make_folder: Make, tmp_path: Path) -> None:
    rows = [question(0), question(1), question(3, question="Who is number 1 ?")]
    assert ingest(make_folder(rows), tmp_path / "out")["leakage"]["repeated_question_texts"] == 1


def test_unscorable_questions_can_be_left_out_and_are_counted(make_folder: Make, tmp_path: Path) -> None:
    rows = [question(0), question(1), question(3, answers=["---"]), question(5, answers=["*", "the x"])]
    manifest = ingest(make_folder(rows), tmp_path / "out", FolderConf(unscorable="drop"))
    assert manifest["unscorable"] == {"policy": "drop", "rows_dropped": ["d/3"], "aliases_dropped": 1}
    assert manifest["questions"]["d"]["rows"] == 3


@pytest.mark.parametrize("text", ["[" * 100_000, '{"corpus": ' + "9" * 6_000 + "}", "{"])
def test_a_manifest_that_cannot_be_read_is_named(make_folder: Make, tmp_path: Path, text: str) -> None:
    folder = make_folder()
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: .*not JSON"):
        ingest(folder, tmp_path / "out")


def test_declared_hashes_are_verified(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    digest = hashlib.sha256((folder / "corpus.jsonl").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"corpus": {"sha256": digest}}))
    ingest(folder, tmp_path / "out")
    (folder / "corpus.jsonl").write_text(lines([passage(n) for n in range(4)]))
    with pytest.raises(DataError, match=f"corpus.jsonl: the unpacked file has sha256 .* declares {digest}"):
        ingest(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_publish_checks_what_a_generator_wrote(tmp_path: Path) -> None:
    def write(folder: Path, gold: str = "p1") -> None:
        (folder / "corpus.jsonl").write_text(lines([passage(1)]))
        (folder / "questions.jsonl").write_text(lines([question(n, gold_passage_ids=[gold]) for n in range(2)]))

    manifest = publish(write, tmp_path / "out", "world")
    assert (manifest["kind"], manifest["questions"]["d"]["rows"]) == ("world", 2)
    with pytest.raises(DataError, match=r"^generated questions\.jsonl: row 1: field 'gold_passage_ids': found 'p9'"):
        publish(lambda folder: write(folder, "p9"), tmp_path / "out", "world")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest


def test_keys_find_exactly_the_ids_they_were_made_from() -> None:
    import numpy as np

    keys = np.sort(np.array([key_of(f"p{n}") for n in range(100)], np.uint64))
    assert [contains(keys, key_of(f"p{n}")) for n in (0, 99, 100)] == [True, True, False]


def test_memory_does_not_grow_with_the_corpus(make_folder: Make, tmp_path: Path) -> None:
    def peak(count: int) -> int:
        folder = make_folder(None, [passage(n, text="word " * 240) for n in range(count)])
        tracemalloc.start()
        try:
            ingest(folder, tmp_path / "out")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(2_000), peak(20_000)  # Both files are larger than the blocks in which they are hashed.
    # A passage costs its 8-byte key: held twice while sorting, in an array that grows by at most an eighth.
    assert large - small < 18_000 * 8 * 4, (small, large)


def test_real_data(real_folder: Path, real_data: Path) -> None:
    manifest = json.loads((real_data / "manifest.json").read_text())
    declared = json.loads((real_folder / "manifest.json").read_text())
    assert manifest["corpus"] == {key: declared["corpus"][key] for key in ("rows", "by_dataset")}
    for dataset, counts in declared["questions"].items():
        lost = sum(one.startswith(f"{dataset}/") for one in manifest["unscorable"]["rows_dropped"])
        assert manifest["questions"][dataset]["rows"] == counts["rows"] - lost
        assert manifest["questions"][dataset]["gold_complete"] == counts["gold_complete"]
    unscorable = "nq/a5" if real_folder == REAL_LIKE else "nq/c0d9de0acf8cb7ec"
    assert manifest["unscorable"]["rows_dropped"] == [unscorable]
    assert manifest["leakage"]["train_rows_dropped"] == []
