"""Splits of our own: shares, groups that stay together, and what the result may depend on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.conf import fill
from tasks.data.ingest import FolderConf, ingest
from tasks.data.records import read_questions
from tasks.data.resplit import Resplit, Stratum, assign
from tasks.data.settings import DataConf
from tasks.store import DataError
from tests.data.rows import Row, lines, passage, question
from tests.skips import REAL, needs_shared

Make = Callable[..., Path]
SHARES = Resplit(train=0.6, dev=0.1, test=0.3)
RESPLIT = FolderConf(unscorable="drop", resplit=SHARES)

STRATA = st.tuples(st.sampled_from("ab"), st.integers(1, 3))
KEYS = st.integers(0, 10**6).map(lambda number: random.Random(number).randbytes(16))
ROWS = st.lists(st.tuples(STRATA, KEYS), max_size=80)
PARTS = st.integers(1, 8)
CONFS = st.tuples(PARTS, st.integers(0, 8), PARTS).map(
    lambda parts: Resplit(*(part / sum(parts) if part else None for part in parts))  # type: ignore[arg-type]
)


def _shares_of(rows: list[tuple[Stratum, bytes]], splits: list[str]) -> dict[Stratum, Counter[str]]:
    found: dict[Stratum, Counter[str]] = {}
    for (stratum, _), split in zip(rows, splits, strict=True):
        found.setdefault(stratum, Counter())[split] += 1
    return found


@given(st.lists(st.tuples(STRATA, KEYS), max_size=80, unique_by=lambda row: row[1]), CONFS)
def test_shares_are_within_one_question_in_every_stratum(rows: list[tuple[Stratum, bytes]], conf: Resplit) -> None:
    for counts in _shares_of(rows, assign(rows, [], conf)).values():
        for split, share in conf.shares.items():
            assert abs(counts[split] - share * counts.total()) < 1
        assert counts.keys() <= conf.shares.keys()


@st.composite
def _grouped(draw: st.DrawFn) -> tuple[list[tuple[Stratum, bytes]], list[tuple[bytes, bytes]]]:
    rows = draw(ROWS)
    keys = st.sampled_from([key for _, key in rows] or [b""])
    return rows, draw(st.lists(st.tuples(keys, keys), max_size=20))


@given(_grouped(), CONFS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_pairs_and_repeats_stay_together_in_any_order(
    grouped: tuple[list[tuple[Stratum, bytes]], list[tuple[bytes, bytes]]], conf: Resplit, rng: random.Random
) -> None:
    rows, pairs = grouped
    splits = assign(rows, pairs, conf)
    by_key: dict[bytes, set[str]] = {}
    for (_, key), split in zip(rows, splits, strict=True):
        by_key.setdefault(key, set()).add(split)
    assert all(len(found) == 1 for found in by_key.values())
    assert all(by_key[one] == by_key[other] for one, other in pairs if rows)

    order = rng.sample(range(len(rows)), len(rows))
    turned = [(other, one) for one, other in rng.sample(pairs, len(pairs))]
    again = assign([rows[i] for i in order], turned, conf)
    assert again == [splits[i] for i in order]


def test_groups_leave_the_shares_exact_where_single_questions_can_fill_them() -> None:
    keys = [random.Random(number).randbytes(16) for number in range(1000)]
    rows: list[tuple[Stratum, bytes]] = [(("a", 1 + number % 2), key) for number, key in enumerate(keys)]
    pairs = [(keys[number], keys[number + 1]) for number in range(0, 600, 3)]  # 200 pairs, each over both strata.
    splits = assign(rows, pairs, SHARES)
    assert _shares_of(rows, splits) == {("a", hops): {"train": 300, "dev": 50, "test": 150} for hops in (1, 2)}
    paired = Counter(splits[number] for number in range(0, 600, 3))
    assert 95 < paired["train"] < 145  # As the hash says: duplicates do not all go where most room is.
    assert 35 < paired["test"] < 85


def test_a_group_without_room_goes_where_most_is_and_takes_the_rest_from_where_most_is_left() -> None:
    keys = [random.Random(number).randbytes(16) for number in range(10)]
    rows: list[tuple[Stratum, bytes]] = [(("a", 1), key) for key in keys]
    splits = assign(rows, [(keys[0], key) for key in keys[:8]], SHARES)
    assert splits[:8] == ["train"] * 8  # Of 6, 1 and 3: two are taken from the three of test.
    assert sorted(splits[8:]) == ["dev", "test"]


def test_one_more_question_moves_at_most_one_across_each_cut() -> None:
    rows: list[tuple[Stratum, bytes]] = [(("a", 1), random.Random(number).randbytes(16)) for number in range(301)]
    before, after = assign(rows[:300], [], SHARES), assign(rows, [], SHARES)
    assert sum(one != other for one, other in zip(before, after, strict=False)) <= 2


def _many(num: int = 60) -> list[Row]:
    """Questions of two datasets and two numbers of hops, all published as train or test."""
    return [
        question(n, dataset="de"[n % 2], hops=1 + n % 4 // 2, question=f"Who is number {n}{n}?", answers=[f"N {n}"])
        for n in range(num)
    ]


def _splits(out: Path) -> dict[str, str]:
    return {q.id: q.split for q in read_questions(out / "questions.jsonl")}


def test_a_folder_gets_the_shares_and_keeps_its_published_splits_on_record(make_folder: Make, tmp_path: Path) -> None:
    rows = _many()
    manifest = ingest(make_folder(rows), tmp_path / "out", RESPLIT)
    splits = _splits(tmp_path / "out")
    for dataset in "de":
        for hops in (1, 2):
            found = Counter(splits[row["id"]] for row in rows if (row["dataset"], row["hops"]) == (dataset, hops))
            assert found == {"train": 9, "dev": 2, "test": 4}  # 15 questions: 9, 1.5 and 4.5.
    assert manifest["questions"]["d"]["splits"] == {"train": 18, "dev": 4, "test": 8}
    published = {"d": {"train": {"train": 18, "dev": 4, "test": 8}}, "e": {"test": {"train": 18, "dev": 4, "test": 8}}}
    assert manifest["resplit"] == {"shares": SHARES.shares, "published": published}
    untouched = [{**row, "split": splits[row["id"]]} for row in rows]
    assert {q.id: q for q in read_questions(tmp_path / "out" / "questions.jsonl")} == _read(tmp_path, untouched)


def _read(tmp_path: Path, rows: list[Row]) -> dict[str, Any]:
    (path := tmp_path / "expected.jsonl").write_text(lines(rows), encoding="utf-8")
    return {q.id: q for q in read_questions(path)}


def test_published_splits_stay_where_there_is_no_resplit(make_folder: Make, tmp_path: Path) -> None:
    rows = _many()
    manifest = ingest(make_folder(rows), tmp_path / "out")
    assert _splits(tmp_path / "out") == {row["id"]: row["split"] for row in rows}
    assert "resplit" not in manifest


def test_files_and_rows_in_another_order_give_the_same_bytes(tmp_path: Path) -> None:
    rows, made = _many(), []
    rows += [question(99, id="d/again", question="who is the number 77", dataset="d")]
    for number, order in enumerate((rows, rows[::-1])):
        folder = tmp_path / str(number)
        for name, part in (("x", order[:20]), ("y", order[20:])):
            (folder / name).mkdir(parents=True)
            (folder / name / "questions.jsonl").write_text(lines(part), encoding="utf-8")
        (folder / "corpus.jsonl").write_text(lines([passage(n) for n in range(3)]), encoding="utf-8")
        ingest(folder, tmp_path / f"out{number}", RESPLIT)
        made.append({path.name: path.read_bytes() for path in (tmp_path / f"out{number}").iterdir()})
    assert made[0] == made[1]


def test_what_a_published_split_calls_a_leak_is_kept_in_one_split(make_folder: Make, tmp_path: Path) -> None:
    rows = _many()
    rows += [question(100 + n, question=f"who is the number {n}{n}", dataset="e") for n in range(20)]
    manifest = ingest(make_folder(rows), tmp_path / "out", RESPLIT)
    splits = _splits(tmp_path / "out")
    assert len(splits) == 80
    assert all(splits[f"d/{n}"] == splits[f"d/{100 + n}"] for n in range(20))
    assert manifest["leakage"]["train_rows_dropped"] == []


def test_an_id_that_stands_twice_is_named(make_folder: Make, tmp_path: Path) -> None:
    again = question(1, question="Another?", dataset=_many()[1]["dataset"])
    with pytest.raises(DataError, match=r"row 61: field 'id': found 'd/1' again, first in .*: row 2;"):
        ingest(make_folder([*_many(), again]), tmp_path / "out", RESPLIT)


def test_a_split_without_a_question_is_named(make_folder: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"resplit=.*: found no dev question among 2, expected one or more\. Add"):
        ingest(make_folder(_many(2)), tmp_path / "out", RESPLIT)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"train": 0.6, "dev": 0.1, "test": 0.2}, r"resplit: sum of shares=0\.9: expected 1\."),
        ({"train": 1.2, "dev": -0.5, "test": 0.3}, r"resplit: dev=-0\.5: expected a share above 0"),
        ({"train": 0.7, "dev": 0, "test": 0.3}, r"resplit: dev=0.*: expected a share above 0, or no such key"),
        ({"train": 0.7, "dve": 0.1, "test": 0.2}, r"resplit: unknown key 'dve'. Did you mean 'dev'\?"),
        ({"dev": 0.7, "test": 0.3}, r"resplit: key 'train' is missing"),
        ({"train": "most", "test": 0.3}, r"resplit: train: found 'most'"),
        ({"train": 0.7, "test": 0.3}, r"folder: resplit=.*: expected a share for dev: training, validation_split and"),
        ({"train": 0.7, "dev": 0.3}, r"folder: resplit=.*: expected a share for test: "),
        ({"train": 1}, r"folder: resplit=.*: expected a share for dev and test: "),
    ],
)
def test_bad_shares_are_named(shares: Row, message: str) -> None:
    tree = {"kind": "folder", "validation_split": "dev", "evaluate_splits": ["test"], "folder": {"resplit": shares}}
    with pytest.raises(ValueError, match=rf"^mine\.yaml: {'folder: ' * (not message.startswith('folder'))}{message}"):
        fill(DataConf, tree, "mine.yaml")


@needs_shared(REAL)
def test_real_data_is_split_in_its_shares(tmp_path: Path) -> None:
    manifest = ingest(REAL, tmp_path / "out", RESPLIT)
    counts = {name: row["splits"] for name, row in manifest["questions"].items()}
    total = sum(map(sum, (row.values() for row in counts.values())))
    assert total > 10_000
    for split, share in SHARES.shares.items():
        assert abs(sum(row[split] for row in counts.values()) - share * total) < 12  # Of 12 strata.
    assert manifest["near_duplicates"]["pairs"] > 100
    assert manifest["near_duplicates"]["pairs_across_splits"] == {}
    assert 0 < manifest["sub_questions"]["all_in_training"] < manifest["sub_questions"]["last_in_training"]
