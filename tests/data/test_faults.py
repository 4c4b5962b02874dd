"""Rows that cannot be used: strict stops and writes nothing; skipping keeps every valid row and names every other."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.ingest import FolderConf, ingest
from tasks.data.notes import fault_lines
from tasks.data.records import read_passages, read_questions, to_passage
from tasks.data.resplit import Resplit
from tasks.store import DataError, read_jsonl
from tests.data.rows import Row, lines, passage, question

Make = Callable[..., Path]
SKIP = FolderConf(faulty_rows="skip_and_report", max_passage_chars=200_000)


def _json(row: Row) -> bytes:
    return json.dumps(row).encode()


# A faulty row of the corpus, the reason, the id as far as it can be told, what the message says.
FAULTS: dict[str, tuple[bytes, str, str | None, str]] = {
    "twice": (_json(passage(0)), "duplicate_id", "p0", "field 'id': found 'p0' again, first in row 1; expected unique"),
    "no text": (b'{"id": "p7", "title": "x"}', "missing_field", "p7", "field 'text' is missing"),
    "blank text": (_json(passage(7, text="  ")), "bad_field", "p7", "field 'text': found '  ', expected text that"),
    "no id": (b'{"title": "x", "text": "y"}', "missing_field", None, "field 'id' is missing"),
    "number as id": (_json(passage(7, id=7)), "bad_field", None, "field 'id': found 7 (int), expected text"),
    "half a pair": (b'{"id": "\\ud800", "title": "x", "text": "y"}', "bad_field", None, "without lone surrogates"),
    "unknown field": (_json(passage(7, body="x")), "unknown_field", "p7", "unknown field 'body'"),
    "not UTF-8": (b'{"id": "p7", "title": "x", "text": "\xff"}', "not_utf8", None, "byte 36 is not UTF-8"),
    "not JSON": (b'{"id": "p7"', "not_json", None, "column 12: not JSON"),
    "key twice": (b'{"id": "p7", "id": "p8"}', "repeated_key", None, "key 'id' appears more than once"),
    "a list": (b"[1]", "not_an_object", None, "found list, expected a JSON object"),
    "1 MB": (_json(passage(7, text="word " * 210_000)), "too_long", "p7", "found 1,050,007 characters with the title"),
    "4 MB": (_json(passage(7, text="word " * 840_000)), "too_long", None, "found more than 3,448,576 bytes in one row"),
    "an id of ours": (_json(passage(7, id="generated:7")), "bad_field", "generated:7", "does not begin with"),
}  # fmt: skip


def _put(folder: Path, name: str, rows: list[bytes], packed: bool = False) -> None:
    (folder / name).unlink(missing_ok=True)
    data = b"".join(row + b"\n" for row in rows)
    (folder / f"{name}.gz").write_bytes(gzip.compress(data)) if packed else (folder / name).write_bytes(data)


def _rejected(out: Path) -> list[Row]:
    return [row for _, row in read_jsonl(out / "rejected.jsonl")]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_passage(make_folder: Make, tmp_path: Path, kind: str, packed: bool) -> None:
    bad, reason, name, message = FAULTS[kind]
    folder, good = make_folder(), [_json(passage(n)) for n in range(4)]
    _put(folder, "corpus.jsonl", [good[0], good[1], bad, b"", *good[2:]], packed)
    file = "corpus.jsonl.gz" if packed else "corpus.jsonl"

    strict = FolderConf(max_passage_chars=200_000)
    with pytest.raises(DataError) as stopped:
        ingest(folder, tmp_path / "strict" / "data", strict)
    assert str(stopped.value).startswith(f"{folder / file}: row 3: ")
    assert message in str(stopped.value)
    assert list((tmp_path / "strict").iterdir()) == []

    manifest = ingest(folder, tmp_path / "out", SKIP)
    assert [one.id for one in read_passages(tmp_path / "out" / "corpus.jsonl")] == ["p0", "p1", "p2", "p3"]
    assert manifest["corpus"] == {"rows": 4, "by_dataset": {"d": 4}}
    assert manifest["faulty_rows"]["by_reason"] == {reason: 1}
    [row] = _rejected(tmp_path / "out")
    assert (row["file"], row["row"], row["id"], row["reason"], row["outcome"]) == (file, 3, name, reason, "left out")
    assert message in row["fault"]
    assert str(tmp_path) not in json.dumps(row)
    assert fault_lines(manifest) == [f"faulty rows: 1 (1 {reason})"]


def test_without_faults_skipping_changes_nothing(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    strict, skipped = ingest(folder, tmp_path / "strict"), ingest(folder, tmp_path / "out", SKIP)
    assert skipped["data_sha256"] == strict["data_sha256"]
    assert _rejected(tmp_path / "out") == []
    assert not (tmp_path / "strict" / "rejected.jsonl").exists()
    assert skipped["faulty_rows"] == {
        "policy": "skip_and_report", "max_passage_chars": 200_000, "by_reason": {}, "lost_tails": []
    }  # fmt: skip
    assert fault_lines(strict) == fault_lines(skipped) == []


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (
            ["The #1 hit?"],
            r"'decomposition\[0\]': found 'The #1 hit\?', expected no #k, for #1 is the answer of sub-quest",
        ),
        (["a", "#1 #2"], r"'decomposition\[1\]': found '#1 #2', expected at most #1, for #2 is .* write 'number 2' if"),
        (["a", "#0"], r"'decomposition\[1\]': found '#0', expected at most #1"),
    ],
)
def test_a_sub_question_about_its_own_or_a_later_answer(
    make_folder: Make, tmp_path: Path, asked: list[str], fault: str
) -> None:
    def rows(texts: list[str]) -> list[dict[str, Any]]:
        hops = [{"question": text, "answer": "X", "support_passage_id": None} for text in texts]
        return [question(0), question(1, decomposition=hops), question(2, split="test")]

    ingest(make_folder(questions=rows(["The top hit?", "Who sang #1?", "#1 #2"])), tmp_path / "right")
    folder = make_folder(questions=rows(asked))
    with pytest.raises(DataError, match=rf"questions\.jsonl: row 2: field {fault}"):
        ingest(folder, tmp_path / "strict")
    ingest(folder, tmp_path / "out", SKIP)
    assert [(one["row"], one["reason"]) for one in _rejected(tmp_path / "out")] == [(2, "bad_field")]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["good", *(kind for kind in FAULTS if "MB" not in kind)]), max_size=12), st.booleans())
def test_every_valid_row_is_kept_and_every_other_one_named(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], packed: bool
) -> None:
    folder, out = tmp_path_factory.mktemp("any"), tmp_path_factory.mktemp("out") / "data"
    (folder / "questions.jsonl").write_text(lines([question(n) for n in range(2)]))
    rows = [_json(passage(0)), _json(passage(1))]
    rows += [_json(passage(100 + n)) if kind == "good" else FAULTS[kind][0] for n, kind in enumerate(kinds)]
    _put(folder, "corpus.jsonl", rows, packed)
    manifest = ingest(folder, out, SKIP)
    good = ["p0", "p1", *(f"p{100 + n}" for n, kind in enumerate(kinds) if kind == "good")]
    assert [one.id for one in read_passages(out / "corpus.jsonl")] == good
    bad = [(n, FAULTS[kind][1]) for n, kind in enumerate(kinds, 3) if kind != "good"]
    found = _rejected(out)
    assert [(row["row"], row["reason"]) for row in found] == bad
    assert sum(manifest["faulty_rows"]["by_reason"].values()) == len(bad)
    first = {file.name: file.read_bytes() for file in (out).iterdir()}
    ingest(folder, out, SKIP)
    assert {file.name: file.read_bytes() for file in (out).iterdir()} == first


@pytest.mark.parametrize("damage", ["cut", "overwritten", "wrong sum", "not gzip"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_a_damaged_gzip_tail(make_folder: Make, tmp_path: Path, damage: str, share: float) -> None:
    """Everything that can be unpacked before the damage, byte by byte, is what must be kept."""
    folder, rows = make_folder(), [_json(passage(n, text=str(n**5) * 9)) for n in range(1500)]
    _put(folder, "corpus.jsonl", rows, packed=True)
    path = folder / "corpus.jsonl.gz"
    packed = path.read_bytes()
    at = int(len(packed) * share)
    path.write_bytes(
        {
            "cut": packed[:at],
            "overwritten": packed[:at] + b"\xff" * 64 + packed[at + 64 :],
            "wrong sum": packed[:-8] + b"\0\0\0\0" + packed[-4:],
            "not gzip": b"".join(rows),
        }[damage]
    )
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz: row \d+: "):
        ingest(folder, tmp_path / "strict")
    if damage == "not gzip":
        told = r"corpus\.jsonl\.gz: no passage in it \(1 faulty rows were left out, the first: .*corpus.*\), expected"
        with pytest.raises(DataError, match=told):
            ingest(folder, tmp_path / "out", SKIP)
        assert not (tmp_path / "out").exists()
        return
    unpacked, one = b"", zlib.decompressobj(wbits=31)
    for byte in path.read_bytes():
        try:
            unpacked += one.decompress(bytes([byte]))
        except zlib.error:
            break
    whole = []  # Overwritten bytes may spell one more row that cannot be told from a good one.
    for row in unpacked.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            whole.append(to_passage(json.loads(row), "").id)

    manifest = ingest(folder, tmp_path / "out", SKIP)
    kept = [one.id for one in read_passages(tmp_path / "out" / "corpus.jsonl")]
    assert kept == whole
    assert kept[:-1] == [f"p{n}" for n in range(len(kept) - 1)]
    assert len(kept) > 1500 * share * 0.8
    found = _rejected(tmp_path / "out")
    assert found[-1]["reason"] == "damaged_gzip" or damage == "overwritten"
    [tail] = manifest["faulty_rows"]["lost_tails"]
    assert tail["file"] == "corpus.jsonl.gz"
    assert tail["from_row"] > len(kept)
    assert fault_lines(manifest)[-1] == f"damaged: corpus.jsonl.gz, row {tail['from_row']} and all after it are lost"
    if damage == "cut":
        assert tail["from_row"] == len(kept) + 1


def test_faulty_questions_and_a_torn_file_of_them(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    rows = [_json(question(n)) for n in range(4)]
    bad = [b'{"id": "d/9"', _json(question(8, hops="2")), _json(question(1)), _json(question(6, answers=[]))]
    _put(folder, "questions.jsonl", [*rows[:2], *bad, *rows[2:]])
    (folder / "d").mkdir()
    more = [_json(question(n, **({"extra": 1} if n == 50 else {}))) + b"\n" for n in range(10, 2000)]
    (folder / "d" / "questions.jsonl.gz").write_bytes(gzip.compress(b"".join(more))[:-2000])
    manifest = ingest(folder, tmp_path / "out", SKIP)
    kept = {one.id for one in read_questions(tmp_path / "out" / "questions.jsonl")}
    found = [(row["file"], row["row"], row["id"], row["reason"]) for row in _rejected(tmp_path / "out")]
    tail = manifest["faulty_rows"]["lost_tails"][0]
    assert found == [
        ("questions.jsonl", 3, None, "not_json"),
        ("questions.jsonl", 4, "d/8", "bad_field"),
        ("questions.jsonl", 6, "d/6", "bad_field"),
        ("d/questions.jsonl.gz", 41, "d/50", "unknown_field"),
        ("d/questions.jsonl.gz", tail["from_row"], None, "damaged_gzip"),
        ("questions.jsonl", 5, "d/1", "duplicate_id"),
    ]
    assert kept == {*(f"d/{n}" for n in range(4)), *(f"d/{n}" for n in range(10, 9 + tail["from_row"]) if n != 50)}
    assert len(kept) > 1000


def test_questions_that_are_all_faulty_name_the_first(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    _put(folder, "questions.jsonl", [b'{"id": "d/9"', _json(question(8, hops="2"))])
    told = r"\(2 faulty rows were left out, the first: .*questions\.jsonl: row 1: column 13: not JSON.*\)"
    with pytest.raises(DataError, match=rf"questions\.jsonl: no train row {told}\. Add"):
        ingest(folder, tmp_path / "out", SKIP)
    resplit = replace(SKIP, resplit=Resplit(0.6, 0.1, 0.3))
    with pytest.raises(
        DataError, match=rf"found no train question among 0 {told}, expected one or more\. Add questions\."
    ):
        ingest(folder, tmp_path / "out", resplit)
    assert not (tmp_path / "out").exists()


def test_a_question_whose_gold_passage_was_rejected_is_not_complete(make_folder: Make, tmp_path: Path) -> None:
    hops = [{"question": "a", "answer": "b", "support_passage_id": name} for name in ("p1", "p7")]
    two = {"gold_passage_ids": ["p1", "p7"], "gold_complete": True, "decomposition": hops}
    rows = [
        question(0, gold_complete=True),
        question(1, **two),
        question(2, gold_passage_ids=["p7"], gold_complete=True),
        question(3, silver_passage_ids=["p7"], gold_complete=True),
    ]
    folder = make_folder(rows)
    _put(folder, "corpus.jsonl", [*(_json(passage(n)) for n in range(3)), b'{"id": "p7", "title": ""}'])
    with pytest.raises(DataError, match="row 4: field 'text' is missing"):
        ingest(folder, tmp_path / "out")
    manifest = ingest(folder, tmp_path / "out", SKIP)
    kept = {one.id: one for one in read_questions(tmp_path / "out" / "questions.jsonl")}
    assert {name: (one.gold_passage_ids, one.gold_method, one.gold_complete) for name, one in kept.items()} == {
        "d/0": (("p1",), "annotated", True),
        "d/1": (("p1",), "annotated", False),
        "d/2": ((), "none", False),
        "d/3": (("p1",), "annotated", True),
    }
    assert [hop.support_passage_id for hop in kept["d/1"].decomposition] == ["p1", None]
    assert kept["d/3"].silver_passage_ids == ()
    assert manifest["questions"]["d"]["gold_complete"] == 2
    assert manifest["faulty_rows"]["by_reason"] == {"missing_field": 1, "missing_passage": 4}
    found = [(row["row"], row["id"], row["outcome"]) for row in _rejected(tmp_path / "out")[1:]]
    assert [(row, name) for row, name, _ in found] == [(2, "d/1"), (2, "d/1"), (3, "d/2"), (4, "d/3")]
    assert {outcome for _, _, outcome in found} == {"kept without the passage"}


def test_a_declared_hash_that_does_not_fit_is_reported(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    (folder / "manifest.json").write_text(json.dumps({"corpus": {"sha256": hashlib.sha256(b"").hexdigest()}}))
    ingest(folder, tmp_path / "out", SKIP)
    [row] = _rejected(tmp_path / "out")
    assert (row["file"], row["row"], row["reason"]) == ("corpus.jsonl", None, "other_checksum")
    assert row["outcome"] == "the file was read as it is"
    assert str(tmp_path) not in row["fault"]


def test_the_other_rules_stay_as_they_are(make_folder: Make, tmp_path: Path) -> None:
    leak = [question(0), question(2), question(1, question="who is the number 0")]
    with pytest.raises(DataError, match="is also an evaluation question"):
        ingest(make_folder(leak), tmp_path / "out", SKIP)
    with pytest.raises(DataError, match="Or set unscorable: drop"):
        ingest(make_folder([question(0), question(1, answers=["--"])]), tmp_path / "out", SKIP)
    with pytest.raises(ValueError, match="max_passage_chars=0: expected at least 1"):
        FolderConf(max_passage_chars=0)


def test_a_row_without_an_end_is_never_held(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    with (folder / "corpus.jsonl").open("ab") as file:
        for _ in range(60):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + _json(passage(9)) + b"\n")
    tracemalloc.start()
    try:
        ingest(folder, tmp_path / "out", FolderConf(faulty_rows="skip_and_report", max_passage_chars=1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row["reason"] for row in _rejected(tmp_path / "out")] == ["too_long"]
    assert [one.id for one in read_passages(tmp_path / "out" / "corpus.jsonl")] == ["p0", "p1", "p2", "p9"]
    assert peak < 12 << 20


def test_the_form_of_the_list(make_folder: Make, tmp_path: Path) -> None:
    """What stands in artifacts/data/rejected.jsonl, whole."""
    folder = make_folder()
    _put(folder, "corpus.jsonl", [_json(passage(n)) for n in (0, 1, 1)])
    ingest(folder, tmp_path / "out", SKIP)
    expected: dict[str, Any] = {
        "file": "corpus.jsonl",
        "row": 3,
        "id": "p1",
        "reason": "duplicate_id",
        "outcome": "left out",
        "fault": "field 'id': found 'p1' again, first in row 2; expected unique ids. Remove or rename one of the rows.",
    }
    assert _rejected(tmp_path / "out") == [expected]
