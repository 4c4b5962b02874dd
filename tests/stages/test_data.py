"""Stages `data` and `validate`: from a configuration to the files the next stages read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.plan import RunSettings
from tasks.runner import record
from tasks.stages import data, validate
from tasks.store import DataError, read_json
from tests.data.rows import lines, passage, question

HOUSE = Path(__file__).parents[2]
SHARED_KEYS = "validation_split: dev\nevaluate_splits: [dev, test]\n"
FOLDER = f"kind: folder\n{SHARED_KEYS}folder: {{leakage: error, unscorable: drop}}\n"
WORLD = f"""kind: world
{SHARED_KEYS}world:
  seed: 1
  regions: {{train: 2, dev: 1, test: 1}}
  entities: {{person: 12, film: 6, company: 4, university: 4, city: 6, country: 4}}
  distractors: 6
  questions: {{train: 20, dev: 5, test: 10}}
  hop_shares: [0.5, 0.5]
  held_out_share: 0.3
"""


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Any]:
    """A stage context over a root with one data configuration, named `mine`."""

    def make(conf: str, data_folder: str = "conf/data") -> Any:
        (tmp_path / "conf" / "data").mkdir(parents=True)
        (tmp_path / "conf" / "data" / "mine.yaml").write_text(conf)
        for kind in ("model", "scale"):
            (tmp_path / "conf" / kind).symlink_to(HOUSE / "conf" / kind)
        logged: list[tuple[int, dict[str, float]]] = []
        params = SimpleNamespace(data="mine", data_folder=data_folder, scale="laptop", model="qwen2.5-3b")
        run = RunSettings(tmp_path, params)  # type: ignore[arg-type]
        return SimpleNamespace(
            settings=data.settings(run), run=run, root=tmp_path,
            logged=logged, log=lambda step, metrics: logged.append((step, metrics)),
            track=record.Track("data", tmp_path), track_data=lambda purpose, num_rows: None,
        )  # fmt: skip

    return make


def _validate(ctx: Any) -> None:
    validate.body(SimpleNamespace(**(vars(ctx) | {"settings": validate.settings(ctx.run)})))  # type: ignore[arg-type]


def test_world_passes_its_own_checks(context: Callable[..., Any]) -> None:
    ctx = context(WORLD)
    data.body(ctx)
    _validate(ctx)
    manifest = read_json(ctx.root / "artifacts" / "data" / "manifest.json")
    assert manifest["kind"] == "world"
    assert manifest["questions"]["world"]["splits"] == {"train": 20, "dev": 5, "test": 10}
    assert manifest["questions"]["world"]["gold_complete"] == 35
    outcome = read_json(ctx.root / "artifacts" / "validation.json")
    assert (outcome["questions"]["rows"], outcome["passages"]["rows"]) == (35, manifest["corpus"]["rows"])
    assert ctx.logged[0][1]["questions_test"] == 10


def test_folder_in_two_runs_gives_the_same_bytes(context: Callable[..., Any]) -> None:
    ctx = context(FOLDER, "given")
    given = ctx.root / "given"
    given.mkdir()
    (given / "corpus.jsonl").write_text(lines([passage(n) for n in range(3)]))
    (given / "questions.jsonl").write_text(lines([question(n) for n in range(4)] + [question(5, answers=["-"])]))
    made = []
    for _ in range(2):
        data.body(ctx)
        _validate(ctx)
        files = sorted((ctx.root / "artifacts").rglob("*.json*"))
        made.append({path.relative_to(ctx.root): path.read_bytes() for path in files})
    assert made[0] == made[1]
    assert len(made[0]) == 4
    assert str(ctx.root).encode() not in b"".join(made[0].values())


def test_skipped_rows_are_printed_at_the_end(context: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    ctx = context(FOLDER.replace("drop}", "drop, faulty_rows: skip_and_report}"), "given")
    given = ctx.root / "given"
    given.mkdir()
    (given / "corpus.jsonl").write_text(lines([passage(n) for n in (0, 1, 1, 2)]) + '{"id": "p7"}\n')
    (given / "questions.jsonl").write_text(lines([question(n) for n in range(4)]))
    data.body(ctx)
    _validate(ctx)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "3 passages, 2 questions train, 0 questions dev, 2 questions test",
        "faulty rows: 2 (1 duplicate_id, 1 missing_field)",
        "each fault with its file, row and reason: artifacts/data/rejected.jsonl",
    ]


def _given(ctx: Any, num_train: int, num_test: int) -> None:
    given = ctx.root / "given"
    given.mkdir()
    (given / "corpus.jsonl").write_text(lines([passage(1)]))
    splits = ["train"] * num_train + ["test"] * num_test
    rows = [question(n, split=split, question=f"Who is number {n}{n}?") for n, split in enumerate(splits)]
    (given / "questions.jsonl").write_text(lines(rows))


HINT = "questions are for training; DATA=resplit DATA_FOLDER=given makes them 6 of 10"


@pytest.mark.parametrize(("num_train", "is_told"), [(5, True), (11, True), (12, False)])
def test_few_train_rows_name_the_other_split(
    context: Callable[..., Any], capsys: pytest.CaptureFixture[str], num_train: int, is_told: bool
) -> None:
    ctx = context(FOLDER, "given")
    _given(ctx, num_train, 20 - num_train)
    data.body(ctx)
    assert (HINT in capsys.readouterr().out) == is_told


def test_comparisons_that_were_left_out_are_told() -> None:
    near = {"pairs": 0, "pairs_across_splits": {}, "train_rows_near_evaluation": 0, "comparisons_left_out": 1200}
    leakage = {"repeated_question_texts": 0, "gold_passages_of_train_and_evaluation": 0, "train_rows_dropped": []}
    rest = {"kind": "folder", "files": {"questions.jsonl": {"rows": 0}}, "questions": {}, "leakage": leakage}
    rest["unscorable"] = {"rows_dropped": [], "aliases_dropped": 0}
    counts = dict.fromkeys(("questions_train", "questions_dev", "questions_test"), 0)
    (line,) = data._about_splits({**rest, "near_duplicates": near}, counts, "given")
    assert line.startswith("near-duplicates: 1,200 comparisons by frequent words were left out")
    assert not list(data._about_splits({**rest, "near_duplicates": near | {"comparisons_left_out": 0}}, counts, ""))


def test_a_split_of_our_own_is_told_and_counted(
    context: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ctx = context(FOLDER.replace("drop}", "drop, resplit: {train: 0.6, dev: 0.1, test: 0.3}}"), "given")
    _given(ctx, 5, 15)
    data.body(ctx)
    _validate(ctx)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "1 passages, 12 questions train, 2 questions dev, 6 questions test",
        "Our own split of published rows; not comparable with papers. Shares: train 0.6, dev 0.1, test 0.3. "
        "Published splits: artifacts/data/manifest.json; `resplit: null` in conf/data, where it stands for this "
        "scale, keeps them",
    ]
    assert "resplit" in read_json(ctx.root / "artifacts" / "data" / "manifest.json")


def test_a_split_without_questions_is_told_before_anything_is_trained(
    context: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ctx = context(FOLDER, "given")
    _given(ctx, 5, 15)
    data.body(ctx)
    _validate(ctx)
    said = "conf/data/mine.yaml: validation_split=dev: artifacts/data has no question of it, but 15 test, 5 train."
    assert f"warning: {said}" in capsys.readouterr().out

    (ctx.root / "artifacts/validation.json").unlink()
    file = ctx.root / "conf/data/mine.yaml"
    file.write_text(FOLDER.replace("[dev, test]", "[dev]").replace("split: dev", "split: test"))
    ctx.run = RunSettings(ctx.root, ctx.run.params)
    with pytest.raises(
        ValueError, match=r"mine\.yaml: evaluate_splits=\['dev'\]: artifacts/data has no question of these"
    ):
        _validate(ctx)
    assert not (ctx.root / "artifacts/validation.json").exists()


def test_a_violation_stops_validate_without_a_result(context: Callable[..., Any]) -> None:
    ctx = context(FOLDER)
    folder = ctx.root / "artifacts" / "data"
    folder.mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(lines([passage(1)]))
    (folder / "questions.jsonl").write_text(json.dumps(question(1, hops=7)) + "\n")
    with pytest.raises(DataError, match=r"questions\.jsonl: row 1: .*field 'hops': found 7 \(int\), expected 4"):
        _validate(ctx)
    assert not (ctx.root / "artifacts" / "validation.json").exists()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (FOLDER.replace("leakage", "leekage"), "mine.yaml: folder: unknown key 'leekage'. Did you mean 'leakage'"),
        (FOLDER.replace("error", "ignore"), "leakage: found 'ignore', expected one of 'error', 'drop_train'"),
        (FOLDER.replace("kind: folder", "kind: files"), "kind: found 'files', expected one of 'world', 'folder'"),
        (FOLDER.replace("kind: folder", "kind: world"), "world=None: expected the section 'world', because kind"),
        (FOLDER.replace("[dev, test]", "[train]"), "evaluate_splits=.*: expected dev and/or test"),
    ],
)
def test_misspelt_settings(context: Callable[..., Any], conf: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.body(context(conf))


def test_folder_without_a_name(context: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="data_folder is empty"):
        data.body(context(FOLDER, ""))


@pytest.mark.parametrize(("name", "kind"), [("world", "world"), ("folder", "folder"), ("resplit", "folder")])
def test_the_configurations_of_the_house_can_be_read(name: str, kind: str) -> None:
    params = SimpleNamespace(data=name, scale="laptop")
    read = RunSettings(Path(__file__).parents[2], params).data  # type: ignore[arg-type]
    assert read.kind == kind
    assert (read.folder is not None and read.folder.resplit is not None) == (name == "resplit")
