"""The flow on a real Prefect server with a temporary database: states, log, schedule, and the server's death."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.toy import HOUSE, Toy

pytestmark = [pytest.mark.slow, pytest.mark.servers]


class Server:
    """A Prefect server of its own, with its files in a temporary folder."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{port}/api"
        self.env = {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "true",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        }
        words = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prefect", *words],
            env={**os.environ, **self.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 120
        while not self.is_well():
            assert time.monotonic() < until, "the Prefect server did not start"
            assert self.process.poll() is None, "the Prefect server ended while starting"
            time.sleep(0.3)

    def is_well(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.api}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST a filter to its REST interface."""
        import httpx

        for _ in range(5):  # The database of one file may be busy for a moment.
            answer = httpx.post(f"{self.api}/{path}", json=body or {}, timeout=20)
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json()

    def kill(self) -> None:
        """End it the hard way."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def _servers() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for one in servers:
        one.kill()


@pytest.fixture
def server(_servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A running server, the same until a test kills it."""
    if not _servers or _servers[-1].process.poll() is not None:
        _servers.append(Server(tmp_path_factory.mktemp("prefect")))
    return _servers[-1]


def _eventually(find: Any, seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while not (found := find()) and time.monotonic() < until:
        time.sleep(0.3)
    return found


def test_stages_are_tasks_with_their_output_in_the_log(server: Server, finished: Toy) -> None:
    finished.flag("fail-evaluate@b-0")
    done = finished.flow("--set", "evaluate.top_k=5", **server.env)
    assert done.returncode == 1
    assert "error: evaluate@b-0: toy.yaml: evaluate@b-0 was told to fail" in done.stderr
    assert "Traceback" not in done.stderr

    def states() -> dict[str, str] | None:
        runs = server.ask("task_runs/filter")
        found = {run["name"]: run["state_name"] for run in runs}
        return found if len(found) == 7 and "Running" not in found.values() else None

    assert _eventually(states) == {
        "plan": "Completed",
        "data": "Cached",
        "train@a-0": "Cached",
        "train@b-0": "Cached",
        "evaluate@a-0": "Completed",
        "evaluate@b-0": "Failed",
        "report": "Skipped",
    }
    (run,) = server.ask("flow_runs/filter")
    assert run["state_name"] == "Failed"
    assert "evaluate@b-0: toy.yaml" in run["state"]["message"]
    logs = _eventually(lambda: [r["message"] for r in server.ask("logs/filter") if "hello" in r["message"]])
    assert "hello from evaluate@a-0" in logs
    (artifact,) = server.ask("artifacts/filter", {"artifacts": {"key": {"any_": ["result-table"]}}})
    assert "| toy table |" in artifact["data"]


def test_deployments_have_the_form_and_the_schedule_creates_runs(server: Server, finished: Toy) -> None:
    """Also guards the pin of sqlalchemy: with 2.1 everything looks healthy and no run is ever scheduled."""
    code = "from pathlib import Path; from flows.serve import deploy; deploy(Path.cwd(), cron='*/5 * * * *')"
    env = {**finished.env(**server.env), "PYTHONPATH": str(HOUSE)}
    subprocess.run([sys.executable, "-c", code], cwd=finished.root, env=env, check=True, timeout=120)
    found = {one["name"]: one for one in server.ask("deployments/filter")}
    assert set(found) == {"on-demand", "nightly-evaluation"}
    schema = found["on-demand"]["parameter_openapi_schema"]["definitions"]
    assert schema["Form"]["additionalProperties"] is False
    assert "top_k" in schema["EvaluateForm"]["properties"]
    assert "retriever" in schema["Form"]["properties"]
    scheduled = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
    runs = _eventually(lambda: server.ask("flow_runs/filter", scheduled), 60)
    assert runs
    assert {run["deployment_id"] for run in runs} == {found["nightly-evaluation"]["id"]}


def test_a_dead_address_costs_seconds_only(finished: Toy) -> None:
    started = time.monotonic()
    done = finished.flow(PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 0
    assert "no Prefect server answers" in done.stderr
    assert time.monotonic() - started < 20
    assert finished.counts() == []


def _results(toy: Toy) -> dict[str, bytes]:
    return {name: content for name, content in toy.bytes().items() if not name.startswith("artifacts/plan/")}


def test_a_server_that_dies_mid_run_does_not_stop_the_work(server: Server, finished: Toy) -> None:
    wanted = {name: content.replace(b" 3 conf", b" 5 conf") for name, content in _results(finished).items()}
    finished.flag("slow-evaluate@a-0")
    run = finished.start("--set", "evaluate.top_k=5", **server.env)
    finished.wait_for("evaluate@a-0", 60)
    server.kill()
    finished.flag("slow-evaluate@a-0", on=False)
    started = time.monotonic()
    output, _ = run.communicate(timeout=150)
    assert run.returncode == 0, output
    assert _results(finished) == wanted
    assert "Done: 4 of 7 stages executed" in output
    assert time.monotonic() - started < 60
