"""Tracking on a real MLflow store and a real server: what arrives, and that its absence costs seconds only."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.runner import tracking
from tests.pipeline.toy import HOUSE
from tests.stages.test_runner import clone  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

SCRIPT = """\
import sys, time
from pathlib import Path
from tasks.runner import run

TURN = {"kind": "search", "content": "a", "reward": 0.0, "tokens": ["<search>"], "observation": "seen"}
ROW = {"question_id": "q1", "question": "who?", "answers": ["x"], "policy": "a", "turns": [TURN], "answer": "x"}

def body(ctx):
    for step in range(50):
        ctx.log(step, {"loss": 1 / (step + 1), "bad": float("nan")})
    ctx.track.log_params({"train": {"lr": 0.1, "api_key": "hush"}, "server": "http://me:hush@host/x"})
    ctx.track.log_inputs("questions", Path("artifacts/data/out.txt"), "ab" * 32, 5, "train")
    ctx.track.log_artifact(Path("params.yaml"), "files")
    ctx.track.log_table("results.md", "| a |")
    ctx.track.log_trajectory(ROW)
    print("worked", flush=True)
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    while Path(".scratch/hold").exists():
        time.sleep(0.05)

run("train@a-0", body)
"""


def _env(**more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "BREADCRUMB_"))}
    return {**keep, "PYTHONPATH": str(HOUSE), "BREADCRUMB_RUN": "one", **more}


def _run(clone: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":  # noqa: F811
    (clone / "toy.py").write_text(SCRIPT)
    command = [sys.executable, "toy.py", *words]
    return subprocess.run(command, cwd=clone, env=_env(**env), capture_output=True, text=True, timeout=120)


def _wait_for_sender(clone: Path, seconds: float = 60) -> None:  # noqa: F811
    """Wait until the sender has ended, which it does soon after the stage."""
    until = time.monotonic() + seconds
    while found := _senders(clone):
        assert time.monotonic() < until, f"still at work: {found}"
        time.sleep(0.1)


def _senders(clone: Path) -> list[int]:  # noqa: F811
    return [
        process.pid
        for process in psutil.process_iter(["cwd", "cmdline"])
        if process.info["cwd"] == str(clone) and "follow" in (process.info["cmdline"] or [])
    ]


def _ledger(clone: Path) -> Any:  # noqa: F811
    return json.loads((clone / ".scratch/ledger/train@a-0.json").read_text())


def _upload(clone: Path, **env: str) -> "subprocess.CompletedProcess[str]":  # noqa: F811
    command = [sys.executable, "-m", "tasks.runner.tracking", "upload"]
    return subprocess.run(command, cwd=clone, env=_env(**env), capture_output=True, text=True, timeout=120)


def _runs(address: str) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def _check(address: str) -> None:
    from mlflow.tracking import MlflowClient

    runs = _runs(address)
    stage, parent = runs["train@a-0"], runs["pipeline one"]
    assert stage.info.status == parent.info.status == "FINISHED"
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert stage.data.tags["seed"] == "0"
    assert stage.data.tags["system"] == "a"
    assert stage.data.tags["data.questions"] == "ab" * 32
    assert stage.data.params["params.evaluate.top_k"] == "3"
    assert stage.data.params["train.lr"] == "0.1"
    assert "hush" not in json.dumps(stage.data.params)
    assert stage.inputs.dataset_inputs[0].dataset.name == "questions"
    client = MlflowClient(address)
    history = client.get_metric_history(stage.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(s, 1 / (s + 1)) for s in range(50)]
    assert {file.path for file in client.list_artifacts(stage.info.run_id)} >= {"files", "results.md"}
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"results.md"}
    (trace,) = client.search_traces(locations=[stage.info.experiment_id])
    assert [span.name for span in trace.data.spans] == ["q1", "1 search", "information"]


def test_a_stage_reports_to_the_clones_own_database_and_the_ledger_learns_the_run(clone: Path) -> None:  # noqa: F811
    started = time.monotonic()
    done = _run(clone)
    assert time.monotonic() - started < 10
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    _wait_for_sender(clone)
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    _check(address)
    assert _ledger(clone)["mlflow_run_id"] == _runs(address)["train@a-0"].info.run_id


def test_one_sender_serves_all_stages_and_outlives_a_killed_one_but_not_the_pipeline(clone: Path) -> None:  # noqa: F811
    owner = subprocess.Popen(["sleep", "60"])
    try:
        env = {"BREADCRUMB_OWNER": str(owner.pid)}
        (clone / "toy.py").write_text(SCRIPT)
        command = [sys.executable, "toy.py", "60"]
        killed = subprocess.Popen(command, cwd=clone, env=_env(**env), stdout=subprocess.PIPE, start_new_session=True)
        assert killed.stdout is not None
        killed.stdout.readline()
        sender = _senders(clone)
        assert len(sender) == 1
        os.killpg(killed.pid, 9)
        killed.communicate()
        path = clone / ".scratch/tracking"
        _until(lambda: any(json.loads(p.read_text()).get("settled") for p in path.glob("*.sent.json")))
        started = time.monotonic()
        assert _run(clone, **env).returncode == 0
        assert time.monotonic() - started < 5
        assert _ledger(clone)["mlflow_run_id"] is not None  # The sender was warm.
        assert _senders(clone) == sender
    finally:
        owner.kill()
        owner.wait()
    _wait_for_sender(clone, 30)
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    assert sorted(_statuses(address, "train@a-0")) == ["FINISHED", "KILLED"]


def test_rows_of_a_killed_sender_are_sent_by_the_next(clone: Path) -> None:  # noqa: F811
    assert _run(clone).returncode == 0
    for pid in _senders(clone):
        os.kill(pid, 9)
    _run(clone)
    _wait_for_sender(clone)
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    assert _statuses(address, "train@a-0") == ["FINISHED", "FINISHED"]
    assert _ledger(clone)["mlflow_run_id"] is not None


def _until(holds: Callable[[], bool], seconds: float = 40) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def _statuses(address: str, name: str) -> list[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return [run.info.status for run in runs if run.info.run_name == name]


@pytest.fixture
def hanging() -> Iterator[str]:
    """Address of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_dead_or_hanging_server_costs_seconds_once_and_rows_can_be_sent_later(clone: Path, hanging: str) -> None:  # noqa: F811
    started = time.monotonic()
    dead = _run(clone, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert dead.returncode == 0
    assert time.monotonic() - started < 8
    hung = []
    for _ in range(2):
        started = time.monotonic()
        hung.append(_run(clone, MLFLOW_TRACKING_URI=hanging))
        assert time.monotonic() - started < 8
        _wait_for_sender(clone, 20)
    assert [done.returncode for done in hung] == [0, 0]
    assert "".join(done.stderr for done in hung).count("warning: tracking stopped") == 1
    started = time.monotonic()
    again = _run(clone, MLFLOW_TRACKING_URI=hanging)  # The same pipeline run does not ask again.
    assert again.returncode == 0
    assert time.monotonic() - started < 4
    assert not _senders(clone)
    sent = _upload(clone)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert sent.stdout.startswith("tracking: 4 records sent to sqlite:")
    assert _runs(f"sqlite:///{clone}/.scratch/mlflow/mlflow.db")["train@a-0"].info.status == "FINISHED"


@pytest.mark.servers
def test_a_real_server_that_dies_mid_run(clone: Path, tmp_path: Path) -> None:  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = ["server", "--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, "--artifacts-destination", str(tmp_path / "kept")],
        env=_env(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # The pipeline run lives on while its records are sent: a sender that outlives it has 25 s for them.
    owner = subprocess.Popen(["sleep", "280"])
    env = {"MLFLOW_TRACKING_URI": address, "BREADCRUMB_OWNER": str(owner.pid)}
    path = clone / ".scratch/tracking"
    try:
        until = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                assert time.monotonic() < until, "the MLflow server did not start"
                time.sleep(0.3)
        assert "warning" not in _run(clone, **env).stderr
        _until(lambda: any(json.loads(p.read_text()).get("settled") for p in path.glob("*.sent.json")), 90)
        _check(address)
        # The stage ends when the server is dead, however long a busy machine takes to begin the run there.
        hold = clone / ".scratch/hold"
        hold.touch()
        process = subprocess.Popen(
            [sys.executable, "toy.py"],
            cwd=clone,
            env=_env(BREADCRUMB_RUN="two", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        _until(lambda: sum("run_id" in p.read_text() for p in path.glob("*.sent.json")) == 1, 90)
    finally:
        os.killpg(server.pid, 9)
        server.wait()
        owner.kill()
        owner.wait()
    hold.unlink()
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert time.monotonic() - started < 15
    assert _ledger(clone)["mlflow_run_id"] is not None
    _wait_for_sender(clone, 60)
    (state,) = [json.loads(p.read_text()) for p in path.glob("*.sent.json")]
    assert state["failed"]
    assert not state.get("complete")
    later = _run(clone, MLFLOW_TRACKING_URI=address, BREADCRUMB_RUN="two")
    assert later.returncode == 0
    assert (errors + later.stderr).count("warning: tracking stopped") == 1
