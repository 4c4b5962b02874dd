"""Tracking on a real MLflow store and a real server: what arrives, and that its absence costs seconds only."""

import base64
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from mlflow.tracking import MlflowClient

from tasks.runner import record, upload
from tasks.runner.lock import PIPELINE
from tests.pipeline.toy import HOUSE
from tests.stages.test_runner import clone  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

KEY = "BREADCRUMB_RUN"
NAME = "EM 0.500 · small · seed 0 · my run"

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
    Path("made").mkdir(exist_ok=True)
    Path("made/policy.txt").write_text("new")
    Path("results.md").write_text("| a |")
    ctx.track.log_artifact(Path("results.md"), shared=True)
    ctx.track.log_artifact(Path("made"))
    with Path("large.bin").open("wb") as file:
        file.truncate((200 << 20) + 1)
    ctx.track.log_artifact(Path("large.bin"))
    for path in ("results.md", "made/policy.txt"):  # As DVC does before it gives copies back.
        Path(path).rename(f"{path}.moved")
    ctx.track.log_metrics(0, {"a/em": 0.5, "a/em_low": 0.4}, shared=True)
    ctx.track.log_trajectory(ROW)
    print("worked", flush=True)
    if Path(".scratch/fail").exists():
        raise ValueError("asked to fail")
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    while Path(".scratch/hold").exists():
        time.sleep(0.05)

run("train@a-0", body)
"""


def _env(**more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "BREADCRUMB_"))}
    return {**keep, "PYTHONPATH": str(HOUSE), KEY: "one", "BREADCRUMB_NAME": "my run", **more}


def _run(clone: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":  # noqa: F811
    (clone / "toy.py").write_text(SCRIPT)
    command = [sys.executable, "toy.py", *words]
    return subprocess.run(command, cwd=clone, env=_env(**env), capture_output=True, text=True, timeout=120)


def _wait_for_sender(clone: Path, seconds: float = 120) -> None:  # noqa: F811
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


@contextlib.contextmanager
def _pipeline(clone: Path) -> Iterator[None]:  # noqa: F811
    """A run of the flow is at work inside the block."""
    (clone / ".scratch").mkdir(exist_ok=True)
    with FileLock(clone / PIPELINE, timeout=0):
        yield


def _run_id(clone: Path) -> str | None:  # noqa: F811
    """The MLflow run that the report would show for the stage."""
    return record.run_id(clone, json.loads((clone / ".scratch/ledger/train@a-0.json").read_text())["record"])


def _unsent(clone: Path) -> list[Path]:  # noqa: F811
    return list((clone / record.FOLDER).glob("*.jsonl"))


def _upload(clone: Path, **env: str) -> "subprocess.CompletedProcess[str]":  # noqa: F811
    command = [sys.executable, "-m", "tasks.runner.upload"]
    return subprocess.run(command, cwd=clone, env=_env(**env), capture_output=True, text=True, timeout=120)


def _runs(address: str) -> dict[str, Any]:
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(upload.EXPERIMENT)
    assert experiment is not None
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def _check(address: str) -> None:
    runs = _runs(address)
    stage, parent = runs["train@a-0"], runs[NAME]
    assert stage.info.status == parent.info.status == "FINISHED"
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert stage.data.tags["seed"] == "0"
    assert stage.data.tags["system"] == "a"
    assert stage.data.tags["data.questions"] == "ab" * 32
    assert stage.data.params["params.evaluate.top_k"] == "3"
    assert stage.data.params["train.lr"] == "0.1"
    assert "hush" not in json.dumps(stage.data.params)
    assert stage.inputs.dataset_inputs[0].dataset.name == parent.inputs.dataset_inputs[0].dataset.name == "questions"
    assert parent.data.metrics == {"a/em": 0.5, "a/em_low": 0.4}
    client = MlflowClient(address)
    history = client.get_metric_history(stage.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(s, 1 / (s + 1)) for s in range(50)]
    assert {file.path for file in client.list_artifacts(stage.info.run_id)} == {"made", "results.md"}
    assert stage.data.tags["artifact.large.bin"] == "large.bin"
    assert {file.path for file in client.list_artifacts(stage.info.run_id, "made")} == {"made/policy.txt"}
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"results.md"}
    (trace,) = client.search_traces(locations=[stage.info.experiment_id])
    assert [span.name for span in trace.data.spans] == ["q1", "1 search", "information"]


def test_a_file_that_cannot_be_kept_costs_a_warning_and_no_other_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    track = record.Track("train@a-0", tmp_path)
    track.log_artifact(Path("absent"))
    track.end("FINISHED", 1.0)
    (path,) = _unsent(tmp_path)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["artifact", "end"]
    assert not list(path.with_suffix("").glob("*"))
    assert "tracking does not keep absent: FileNotFoundError" in capsys.readouterr().err


def test_a_stage_reports_to_the_clones_own_database_and_the_ledger_learns_the_run(clone: Path) -> None:  # noqa: F811
    started = time.monotonic()
    done = _run(clone)
    assert time.monotonic() - started < 10
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    _wait_for_sender(clone)
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    _check(address)
    assert _run_id(clone) == _runs(address)["train@a-0"].info.run_id


def test_one_sender_serves_all_stages_and_outlives_a_killed_one_but_not_the_pipeline(clone: Path) -> None:  # noqa: F811
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    with _pipeline(clone):
        (clone / "toy.py").write_text(SCRIPT)
        command = [sys.executable, "toy.py", "60"]
        killed = subprocess.Popen(command, cwd=clone, env=_env(), stdout=subprocess.PIPE, start_new_session=True)
        assert killed.stdout is not None
        killed.stdout.readline()
        _until(lambda: _senders(clone))  # The shell that starts it does not wait for it.
        sender = _senders(clone)
        assert len(sender) == 1
        _until(lambda: any(record.read_state(path).get("run") for path in _unsent(clone)))
        time.sleep(4 * upload.POLL_S)
        assert _statuses(address, "train@a-0") == ["RUNNING"]
        os.killpg(killed.pid, 9)
        killed.communicate()
        _until(lambda: not _unsent(clone))
        started = time.monotonic()
        assert _run(clone).returncode == 0
        assert time.monotonic() - started < 5
        _until(lambda: _run_id(clone) is not None, 10)  # The sender was warm.
        time.sleep(2 * upload.LINGER_S)
        assert _senders(clone) == sender
    _wait_for_sender(clone, 30)
    assert sorted(_statuses(address, "train@a-0")) == ["FINISHED", "KILLED"]


def test_rows_of_a_killed_sender_are_sent_by_the_next(clone: Path) -> None:  # noqa: F811
    assert _run(clone).returncode == 0
    for pid in _senders(clone):
        os.kill(pid, 9)
    _run(clone)
    _wait_for_sender(clone)
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    assert _statuses(address, "train@a-0") == ["FINISHED", "FINISHED"]
    assert _run_id(clone) is not None


def _until(holds: Callable[[], object], seconds: float = 40) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def _statuses(address: str, name: str) -> list[str]:
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(upload.EXPERIMENT)
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


def test_a_dead_or_hanging_server_costs_seconds_once_and_rows_can_be_sent_later(
    clone: Path,  # noqa: F811
    hanging: str,
) -> None:
    started = time.monotonic()
    dead = _run(clone, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert dead.returncode == 0
    assert time.monotonic() - started < 5
    _wait_for_sender(clone, 20)
    assert "http://127.0.0.1:9" in (clone / record.WARNING).read_text()
    (clone / record.WARNING).unlink()

    hung = []
    with _pipeline(clone):
        for _ in range(3):
            started = time.monotonic()
            hung.append(_run(clone, MLFLOW_TRACKING_URI=hanging))
            assert time.monotonic() - started < 5
            _until(lambda: len(_senders(clone)) == 1)
            _until(lambda: hung[:-1] or (clone / record.WARNING).exists())
    _wait_for_sender(clone, 30)
    assert [done.returncode for done in hung] == [0, 0, 0]
    assert "".join(done.stderr for done in hung).count("warning: tracking stopped") == 1

    sent = _upload(clone)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert sent.stdout.startswith("tracking: 4 records sent to sqlite:")
    assert _runs(f"sqlite:///{clone}/.scratch/mlflow/mlflow.db")["train@a-0"].info.status == "FINISHED"


def test_stages_of_a_bare_dvc_are_one_pipeline_run(clone: Path) -> None:  # noqa: F811
    """DVC names the stage in a variable; its stages are its children, as those of this process are here."""
    keys = set()
    for stage in ("train@a-0", "train@b-0"):
        (clone / "toy.py").write_text(SCRIPT.replace("train@a-0", stage))
        env = {key: value for key, value in _env(DVC_STAGE=stage, BREADCRUMB_TRACKING="off").items() if key != KEY}
        subprocess.run([sys.executable, "toy.py"], cwd=clone, env=env, check=True, timeout=60)
        (rows,) = (clone / record.FOLDER).glob(f"{stage}-*.jsonl")
        keys.add(json.loads(rows.read_text().splitlines()[0])["pipeline"])
    (key,) = keys
    assert key.startswith(f"dvc-{os.getpid()}-")


@contextlib.contextmanager
def _mlflow(folder: Path, port: int = 0) -> Iterator[str]:
    """Address of a real server."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = ["server", "--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    server = subprocess.Popen(
        [sys.executable, "-m", "flows.mlflow_server", *words, "--artifacts-destination", str(folder / "kept")],
        env=_env(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{address}/health", timeout=2).status == 200)
        return False

    try:
        _until(answers, 120)
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@contextlib.contextmanager
def _guarded(address: str, authorization: str) -> Iterator[tuple[int, list[str]]]:
    """Port of a proxy that hands on what comes with this authorization, and what it was asked for: paths and hosts."""
    asked: list[str] = []

    class Guard(http.server.BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            asked.append(f"{self.headers['Host']} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers["Authorization"] != authorization:
                self.send_error(401)
                return
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            request = urllib.request.Request(address + self.path, body or None, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(request, timeout=30)
            except urllib.error.HTTPError as error:
                answer = error
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def _written(clone: Path, done: "subprocess.CompletedProcess[str]") -> str:  # noqa: F811
    """Everything that a run has left in files and on the terminal."""
    files = [path.read_bytes() for path in (clone / ".scratch").rglob("*") if path.is_file()]
    return b"".join(files).decode(errors="replace") + done.stdout + done.stderr


@pytest.mark.servers
def test_a_password_or_token_opens_the_server_and_is_written_nowhere(clone: Path, tmp_path: Path) -> None:  # noqa: F811
    login = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "hunter2@/?"}
    basic = "Basic " + base64.b64encode(b"me:hunter2@/?").decode()
    token = {"MLFLOW_TRACKING_TOKEN": "hunter2"}
    with _mlflow(tmp_path) as address:
        for opened, authorization in ((login, basic), (token, "Bearer hunter2")):
            with _guarded(address, authorization) as (port, asked):
                done = _run(clone, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}", **opened)
                _wait_for_sender(clone)
                assert not _unsent(clone), _written(clone, done)
                assert asked
                assert "hunter2" not in "".join(asked)
                assert "hunter2" not in _written(clone, done)
        assert _statuses(address, "train@a-0") == ["FINISHED"] * 2


@pytest.mark.parametrize(
    "place",
    [
        "me:hunter2@127.0.0.1:9",
        "me:hunter2/x@127.0.0.1:9",
        "me:hunter2@b@127.0.0.1:9",
        "me:?token=hunter2@127.0.0.1:9",
        "127.0.0.1:9/?token=hunter2",
        "127.0.0.1:9/?next=hunter2@127.0.0.2:9",
        "hunter2/x@127.0.0.1:9",
    ],
)
def test_an_address_that_may_hold_a_password_is_refused_and_shows_none(clone: Path, place: str) -> None:  # noqa: F811
    """Nobody listens at the place, and the message is not that of a connection: nothing has been asked."""
    done = _run(clone, MLFLOW_TRACKING_URI=f"http://{place}")
    _wait_for_sender(clone)
    assert done.returncode == 0
    written = _written(clone, done)
    assert "MLFLOW_TRACKING_URI: expected http://host:port, without a login or a query. Put the login into" in written
    assert "tracking stopped" in written
    assert "hunter2" not in written
    assert _unsent(clone)
    assert "hunter2" not in _upload(clone, MLFLOW_TRACKING_URI=f"http://{place}").stdout


def test_a_sender_killed_before_it_noted_what_it_sent_sends_nothing_twice(clone: Path) -> None:  # noqa: F811
    """All that MLflow has comes once more, as if the sender had died just before it wrote its state file."""
    assert _run(clone, BREADCRUMB_TRACKING="off").returncode == 0
    (rows,) = _unsent(clone)
    text = "".join(line for line in rows.read_text().splitlines(True) if '"kind": "trajectory"' not in line)
    for _ in range(2):
        rows.write_text(text)
        rows.with_suffix(record.STATE).unlink(missing_ok=True)
        assert _upload(clone).returncode == 0
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    assert _statuses(address, "train@a-0") == _statuses(address, NAME) == ["FINISHED"]
    history = MlflowClient(address).get_metric_history(_runs(address)["train@a-0"].info.run_id, "loss")
    assert len(history) == 50


def test_a_sender_killed_before_it_removed_a_record_changes_no_status(clone: Path) -> None:  # noqa: F811
    assert _run(clone, BREADCRUMB_TRACKING="off").returncode == 0
    (rows,) = _unsent(clone)
    text = rows.read_text()
    for _ in range(2):
        rows.write_text(text)
        assert _upload(clone).returncode == 0
    assert _statuses(f"sqlite:///{clone}/.scratch/mlflow/mlflow.db", "train@a-0") == ["FINISHED"]


def test_a_pipeline_run_ends_like_the_worst_of_its_stages_and_the_view_has_its_results(clone: Path) -> None:  # noqa: F811
    (clone / ".scratch").mkdir(exist_ok=True)
    (clone / ".scratch/fail").touch()
    assert _run(clone, BREADCRUMB_TRACKING="off").returncode == 1
    (clone / ".scratch/fail").unlink()
    assert _run(clone, BREADCRUMB_TRACKING="off").returncode == 0
    assert _upload(clone).returncode == 0
    address = f"sqlite:///{clone}/.scratch/mlflow/mlflow.db"
    assert sorted(_statuses(address, "train@a-0")) == ["FAILED", "FINISHED"]
    assert _statuses(address, NAME) == ["FAILED"]
    experiment = MlflowClient(address).get_experiment_by_name(upload.EXPERIMENT)
    assert json.loads(experiment.tags[upload.VIEW])["selectedColumns"] == upload.COLUMNS


@pytest.mark.servers
def test_a_real_server_that_dies_mid_run(clone: Path, tmp_path: Path) -> None:  # noqa: F811
    hold = clone / ".scratch/hold"
    with _pipeline(clone):
        with _mlflow(tmp_path) as address:
            env = {"MLFLOW_TRACKING_URI": address}
            assert "warning" not in _run(clone, **env).stderr
            _until(lambda: not _unsent(clone), 90)
            _check(address)
            # The stage ends when the server is dead, however long a busy machine takes to begin the run there.
            hold.touch()
            process = subprocess.Popen(
                [sys.executable, "toy.py"],
                cwd=clone,
                env=_env(**{**env, "BREADCRUMB_RUN": "two"}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            process.stdout.readline()
            _until(lambda: any(record.read_state(path).get("run") for path in _unsent(clone)), 90)
        hold.unlink()
        started = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert time.monotonic() - started < 5
        assert _run_id(clone) is not None
        _until(lambda: "warning" in errors or (clone / record.WARNING).exists())
        later = _run(clone, **{**env, "BREADCRUMB_RUN": "two"})
    _wait_for_sender(clone, 60)
    assert later.returncode == 0
    assert (errors + later.stderr).count("warning: tracking stopped") == 1
    assert len(_unsent(clone)) == 2
    with _mlflow(tmp_path, int(address.rpartition(":")[2])):
        assert _upload(clone, **env).returncode == 0
    assert not _unsent(clone)
    assert _statuses(f"sqlite:///{tmp_path}/server.db", "train@a-0") == ["FINISHED"] * 3
