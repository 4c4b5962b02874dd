"""What users name and what disks damage, sent to a real MLflow store: no record stops the next ones."""

import contextlib
import json
import shutil
import sqlite3
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.prompts import Prompt
from tasks.records import schema
from tasks.records.trajectories import trajectory_row
from tasks.records.usage import Usage
from tasks.runner import record, upload
from tasks.runner.git import Commit
from tasks.services import Messages, Reply
from tasks.systems.chat_agent import ChatAgent
from tests.once import made_once
from tests.systems.asked_model import AskedModel
from tests.systems.test_chat_agent import QUESTIONS, Towns

pytestmark = pytest.mark.slow

NAMES = [
    "NQ (open)", "NQ [open]", "NQ _open_", "2Wiki (v2)", "a//b", "../x", "..", ".", "", "/abs", "end/", "x" * 600,
    "x" * 601, "Zürich", "Zu\u0308rich", "a\nb", "it's \"odd\" `too`", "\U0001f600", "%2e%2e", "a\x00b",
    "back\\slash", "a;b#c?d=e&f", "half \udc80", "\u202ertl", "mlflow.odd", "-- drop table", " ", "tab\t",
    "日本語 (測試)",
]  # fmt: skip
TURN = {"kind": "search", "content": "<search>a</search>", "reward": 0.0, "tokens": None, "observation": "seen"}


@pytest.fixture
def root(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A clone with an empty store, whose records no process sends but the test."""

    def clear() -> None:
        for name in ("MLFLOW_TRACKING_URI", "BREADCRUMB_NAME", "DVC_STAGE"):
            monkeypatch.delenv(name, raising=False)

    def make(folder: Path) -> None:
        clear()  # Tests before this one have told MLflow of their stores.
        upload.connect(folder)

    empty = made_once(tmp_path_factory, "mlflow", make)
    clear()
    monkeypatch.setenv("BREADCRUMB_RUN", "one's (run)")
    monkeypatch.setattr(record, "_start_sender", lambda root: None)
    (tmp_path / ".scratch/mlflow").mkdir(parents=True)
    (tmp_path / upload.DATABASE).write_bytes((empty / upload.DATABASE).read_bytes())
    return tmp_path


def _track(root: Path, stage: str = "train@a-0", **params: Any) -> record.Track:
    return record.start(stage, {"scale": "smoke", "seeds": [0], **params}, root, Commit("abc", False))


def _runs(root: Path) -> dict[str, Any]:
    client = MlflowClient(record.address(root))
    experiment = client.get_experiment_by_name(upload.EXPERIMENT)
    assert experiment is not None
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def _refused(root: Path) -> list[dict[str, Any]]:
    files = (root / record.REFUSED).glob("*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_nothing_that_a_user_can_name_breaks_a_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREADCRUMB_NAME", "it's (mine) " + "long " * 200)
    track = _track(
        root, "train@it's (odd)-0", data="NQ (open)", set={"train.policy.lr": 1e-4, "deep": [{"token": "hush"}]}
    )
    for number, name in enumerate(NAMES):
        track.log_metrics(0, {f"recall {name}": number})
        track.set_tags({f"tag {name}": name * 20})
        track.log_params({f"of {name}": name * 20})
        track.log_inputs(name, Path(f"data/{name}"), "ab" * 32, 5, "train")
        track.log_trajectory(
            {"question_id": name, "question": name, "answers": [name], "turns": [TURN], "answer": name}
        )
        if name.strip("./ ") and "/" not in name and "\0" not in name and len(name) < 200:
            (root / "made").mkdir(exist_ok=True)
            (root / "made" / name).touch()
    track.log_artifact(Path("made"), shared=True)
    track.log_artifact(Path("made/NQ (open)"))
    track.log_artifact(Path("made/it's not \udc80 (there)"))
    track.log_metrics(0, {"best/em": 0.774, **{f"{name}/em": 0.5 for name in NAMES}}, shared=True)
    track.end("FINISHED", 1.0)
    track._file = None

    assert upload.main([], root) == 0
    assert _refused(root) == []
    runs = _runs(root)
    stage = runs["train@it's (odd)-0"]
    recalls = {key: value for key, value in stage.data.metrics.items() if "recall" in key}
    assert sorted(recalls.values()) == list(range(len(NAMES))), "two names became one"
    assert len([key for key in stage.data.params if key.startswith("of ")]) == len(NAMES)
    assert stage.data.params["params.set.train.policy.lr"] == "0.0001"
    assert "hush" not in str(stage.data.params)
    (parent,) = [run for name, run in runs.items() if name.startswith("EM 0.774 · smoke · seed 0 · it's (mine) long")]
    assert parent.info.status == "FINISHED"
    assert "Zürich/em" in parent.data.metrics


class Scripted:
    """A chat model that searches for the town and then answers."""

    model, usage = "scripted", Usage()

    def replies(self, conversations: Iterable[Messages], request: Any = None) -> Generator[Reply, None, None]:
        for messages in conversations:
            yield Reply(WROTE[len(messages) // 2], "stop", 7)


WROTE = ("<think> so </think> <search> town </search>", "<think> well </think> <answer> Hask </answer>")


def test_plays_of_a_chat_model_which_have_no_tokens_show_what_it_wrote(root: Path) -> None:
    (question, *_), prompt = QUESTIONS, "{passages} {question}"
    agent = ChatAgent(Scripted(), Towns(), SearchR1Grammar(), Prompt(None, "Play: {question}"), 3, 1, 0, 8)
    track = _track(root, "evaluate@chat_agent-0")
    for name, system in (("chat_agent", agent), ("asked", AskedModel(Scripted(), Towns(), 1, prompt))):
        (episode,) = system.play([question], "greedy", 0)
        row = schema.plain(trajectory_row(episode, question, policy=name, seed=0, mode="greedy"))
        assert [turn["tokens"] for turn in row["turns"]] == [None, None]
        track.log_trajectory(row)
    track.end("FINISHED", 1.0)
    track._file = None

    assert upload.main([], root) == 0
    assert _refused(root) == []
    client = MlflowClient(record.address(root))
    traces = client.search_traces(locations=[_runs(root)["evaluate@chat_agent-0"].info.experiment_id])
    shown = [span.inputs["wrote"] for trace in traces for span in trace.data.spans if "wrote" in (span.inputs or {})]
    assert sorted(shown) == sorted([*WROTE, question.question, WROTE[0]])


def test_what_mlflow_does_not_take_is_put_aside_with_its_reason_and_the_rest_is_sent(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _track(root, "train@a-0")
    first._write("batch", params={"lr": "1"}, metrics={}, tags={})
    first._write("trajectory", row={"question_id": "q", "turns": [{"kind": "search", "tokens": 5}]})
    first._write("novel", what="of a later version")
    first._write("batch", step=0, metrics={"loss": 0.5, "odd": "text"})
    first.log_metrics(1, {"loss": 0.25})
    first.end("FINISHED", 1.0)
    path = root / record.FOLDER / f"{first.record}.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "batch", "par\x00\x01\n5\n[]\n')
    second = _track(root, "train@b-0")
    second.end("FINISHED", 1.0)
    first._file = second._file = None

    assert upload.main([], root) == 0
    said = capsys.readouterr().out
    assert "2 records sent" in said
    assert "0 left" in said
    assert f"MLflow did not take 6 rows of {record.REFUSED}/{first.record}.jsonl: TypeError: " in said
    kinds = [row["kind"] for row in _refused(root)]
    assert kinds == ["trajectory", "novel", "batch", "unreadable", "unreadable", "unreadable"]
    assert all(row["reason"] for row in _refused(root))
    runs = _runs(root)
    assert runs["train@a-0"].info.status == runs["train@b-0"].info.status == "FINISHED"
    assert runs["train@a-0"].data.metrics["loss"] == 0.25
    assert runs["train@a-0"].data.params["lr"] == "1"

    _track(root, "train@c-0").end("FINISHED", 1.0)
    for content in (b"", b"\n", b"\xff\xfe"):  # As a full disk or a damaged one leaves them.
        (root / record.REFUSED / "torn.jsonl").write_bytes(content)
        assert upload.main([], root) == 0, "what lies aside is no reason to fail for ever"


def test_a_run_or_experiment_that_its_user_deleted_stops_no_other(root: Path) -> None:
    client = MlflowClient(record.address(root))
    track = _track(root)
    upload.main([], root)
    client.delete_run(_runs(root)["train@a-0"].info.run_id)
    track.log_metrics(0, {"loss": 1.0})
    track.end("FINISHED", 1.0)
    track._file = None
    assert upload.main([], root) == 0
    assert {row["kind"] for row in _refused(root)} == {"batch", "end"}

    client.delete_experiment(client.get_experiment_by_name(upload.EXPERIMENT).experiment_id)
    _track(root, "train@b-0").end("FINISHED", 1.0)
    assert upload.main([], root) == 0
    assert _runs(root)["train@b-0"].info.status == "FINISHED"


def test_a_store_that_takes_nothing_now_loses_no_row(root: Path) -> None:
    track = _track(root)
    upload.main([], root)
    track.log_metrics(0, {"loss": 1.0})
    track.end("FINISHED", 1.0)
    track._file = None
    with sqlite3.connect(root / upload.DATABASE) as store:
        store.execute("CREATE TRIGGER full BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'full'); END")
        store.execute("CREATE TRIGGER too BEFORE UPDATE ON experiment_tags BEGIN SELECT RAISE(ABORT, 'full'); END")
        store.execute("CREATE TRIGGER also BEFORE INSERT ON experiment_tags BEGIN SELECT RAISE(ABORT, 'full'); END")
    assert upload.main([], root) == 1
    assert _refused(root) == []
    with sqlite3.connect(root / upload.DATABASE) as store:
        for name in ("full", "too", "also"):
            store.execute(f"DROP TRIGGER {name}")
    assert upload.main([], root) == 0
    assert _runs(root)["train@a-0"].data.metrics["loss"] == 1.0


def _sent(clone: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Send a record with a file from this clone; the stages whose files its store then has, all of them below it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow is told of one store after the other.
    (clone / f"{stage}.txt").write_text(stage, encoding="utf-8")
    track = _track(clone, stage)
    track.log_artifact(Path(f"{stage}.txt"))
    track.end("FINISHED", 1.0)
    track._file = None
    assert upload.main([], clone) == 0
    assert (list((clone / record.FOLDER).glob("*.jsonl")), _refused(clone)) == ([], [])

    client, runs = MlflowClient(record.address(clone)), [run.info for run in _runs(clone).values()]
    place = f"{(clone / upload.ARTIFACTS).as_uri()}/"
    assert [run.artifact_uri for run in runs if not run.artifact_uri.startswith(place)] == []
    names = {file.path for run in runs for file in client.list_artifacts(run.run_id)}
    assert {path.name for path in (clone / upload.ARTIFACTS).rglob("*.txt")} == names
    return {name.removesuffix(".txt") for name in names}


def test_files_of_a_clone_that_was_copied_and_moved_twice_lie_in_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's name begins with that of the first clone; a file stands where the copy has been."""
    first, copy, moved, last = (root / name for name in ("c", "c2", "c ü%20", "d#1"))
    shutil.copytree(root / ".scratch", first / ".scratch")
    assert _sent(first, "plan", monkeypatch) == {"plan"}
    before = sorted(first.rglob("*"))
    shutil.copytree(first, copy)
    assert _sent(copy, "data", monkeypatch) == {"plan", "data"}
    copy.rename(moved)
    copy.write_text("a file", encoding="utf-8")
    assert _sent(moved, "index", monkeypatch) == {"plan", "data", "index"}
    moved.rename(last)
    assert _sent(last, "report", monkeypatch) == {"plan", "data", "index", "report"}
    assert (sorted(first.rglob("*")), copy.read_text(), moved.exists()) == (before, "a file", False)


@pytest.mark.parametrize("how", ["stopped", "killed", "failed", "whole"])
def test_a_pipeline_run_ends_as_it_did_although_its_stages_are_finished(root: Path, how: str) -> None:
    """The stage that has ended is FINISHED; those that had not begun say nothing."""

    title = "smoke · seed 0 · a"
    if how == "killed":  # Nobody writes the end of the record.
        track = record.Track("pipeline", root)
        track._write("pipeline", pipeline="one's (run)", title=title, to=None)
        _track(root, "plan").end("FINISHED", 1.0)
        del track
    else:
        ended, error = ("FINISHED" if how == "whole" else "KILLED"), contextlib.suppress(ValueError)
        with error, record.pipeline(root, "one's (run)", title, lambda: ended):
            _track(root, "plan").end("FINISHED", 1.0)
            if how == "failed":
                raise ValueError("a stage was damaged")
    assert upload.main([], root) == 0
    status = {"stopped": "KILLED", "killed": "KILLED", "failed": "FAILED", "whole": "FINISHED"}[how]
    runs = _runs(root)
    assert runs["plan"].info.status == "FINISHED"
    assert runs[title].info.status == status


def test_a_warning_of_an_earlier_run_is_not_told_by_the_next(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / record.FOLDER).mkdir(parents=True)
    (root / record.WARNING).write_text("warning: tracking stopped: old", encoding="utf-8")
    track = _track(root)
    assert capsys.readouterr().err == ""
    (root / record.WARNING).write_text("warning: tracking stopped: new", encoding="utf-8")
    track.log_metrics(0, {"em": 1.0})
    assert capsys.readouterr().err == "warning: tracking stopped: new\n"
    assert not (root / record.WARNING).exists()


@pytest.mark.parametrize("left", [b"warning: tracking stopped: old", b"warning: \xff\xc3", b"\n", b""])
def test_two_stages_that_start_at_once_tell_nothing_of_an_earlier_run(
    root: Path, left: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / record.FOLDER).mkdir(parents=True)
    (root / record.WARNING).write_bytes(left)
    both, tracks = threading.Barrier(2, timeout=30), []

    def is_held(path: Path) -> bool:
        both.wait()
        return False

    monkeypatch.setattr(record, "is_held", is_held)
    starting = [threading.Thread(target=lambda: tracks.append(_track(root))) for _ in range(2)]
    for one in starting:
        one.start()
    for one in starting:
        one.join()
    assert (len(tracks), capsys.readouterr().err, (root / record.WARNING).exists()) == (2, "", False)
    assert all(track._file is not None for track in tracks), "both go on"


@pytest.mark.parametrize("left", [b"", b"warning: tracking stopped: \xc3"])
def test_a_warning_that_a_disk_has_damaged_stops_no_record(
    root: Path, left: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    track = _track(root)
    (root / record.WARNING).write_bytes(left)
    track.log_metrics(0, {"em": 1.0})
    said = capsys.readouterr().err
    assert (track._file is not None, said) == (True, f"{left.decode(errors='replace')}\n" if left else "")
    (root / record.WARNING).write_text("warning: tracking stopped: ünlike", encoding="utf-8")
    track.log_metrics(1, {"em": 1.0})
    assert capsys.readouterr().err == "warning: tracking stopped: ünlike\n"
    assert not (root / record.WARNING).exists()


@pytest.mark.parametrize(
    "uri", ["databricks://bob:hunter2@x", "DATABRICKS://hunter2@x", "uc:bob:hunter2@x", "https://a?token=hunter2"]
)
def test_an_address_with_a_login_is_refused_before_mlflow_spells_it_out(
    root: Path, uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    _track(root).end("FINISHED", 1.0)
    assert upload.main([], root) == 1
    said = capsys.readouterr().out
    assert "without a login or a query" in said
    assert "hunter2" not in said
