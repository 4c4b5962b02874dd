"""The flow on a real Prefect server with a temporary database: states, log, schedule, and the server's death."""

import base64
import contextlib
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flows.server import SECONDS_TO_ANSWER, find_server
from tasks import store
from tests import prefect_database
from tests.benchmarks.bench_stops import busy
from tests.pipeline.toy import HOUSE, NAMES, Toy
from tests.server.attacks import exchange, resident_bytes

pytestmark = [pytest.mark.slow, pytest.mark.servers]

PASSWORD = {"PREFECT_SERVER_API_AUTH_STRING": "a:b"}


class Server:
    """A Prefect server of its own, with its files in a temporary folder."""

    def __init__(self, home: Path, **env: str) -> None:
        prefect_database.give(home)
        listening = socket.create_server(("127.0.0.1", 0))
        self.api = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        self.env = {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            **env,
        }
        password = env.get("PREFECT_SERVER_API_AUTH_STRING", "").encode()
        self.headers = {"authorization": f"Basic {base64.b64encode(password).decode()}"} if password else {}
        with listening:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.server", str(listening.fileno())],
                env={**os.environ, **self.env},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
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
        return self.send("POST", path, body or {})

    def get(self, path: str) -> Any:
        """GET from its REST interface."""
        return self.send("GET", path)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers to a request."""
        import httpx

        answer = httpx.request(method, f"{self.api}/{path}", json=body, headers=self.headers, timeout=60)
        answer.raise_for_status()
        return answer.json() if answer.content else None

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
    """A running server with a password, the same until a test kills it."""
    if not _servers or _servers[-1].process.poll() is not None:
        _servers.append(Server(tmp_path_factory.mktemp("prefect"), **PASSWORD))
    return _servers[-1]


def _eventually(find: Any, seconds: float = 30) -> Any:
    """What `find` finds within `seconds`; a server that is too busy to answer is asked again."""
    import httpx

    until = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= until
        try:
            if (found := find()) or late:
                return found
        except httpx.TimeoutException:
            if late:
                raise
        time.sleep(0.3)


def test_stages_are_tasks_with_their_output_in_the_log(server: Server, finished: Toy) -> None:
    finished.flag("fail-evaluate@b-0")
    address = "http://me:hunter2@127.0.0.1:9"
    done = finished.flow("--set", "evaluate.top_k=5", **server.env, MLFLOW_TRACKING_URI=address)
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
    assert "MLflow: http://***@127.0.0.1:9." in artifact["data"]
    assert "hunter2" not in artifact["data"]


@contextlib.contextmanager
def _served(toy: Toy, server: Server, name: str, **env: str) -> Iterator[str]:
    """What `make ui` serves, while the block runs; yields the id of the deployment.

    Prefect registers it once more before it asks for runs, so what is changed earlier would be undone.
    """
    begun = time.time()
    process = toy.command_in_background("flows.serve", name, **server.env, **env)
    try:
        assert process.stdout is not None
        printed = ""
        while not (found := re.search(r"Form: +\S+/deployment/([0-9a-f-]{36})", printed)):
            line = process.stdout.readline()
            assert line, printed
            printed += line
        assert _eventually(lambda: _last_polled(server, found[1]) > begun, 60)
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
    assert _eventually(lambda: toy.processes() == [], 15), toy.processes()


def _last_polled(server: Server, deployment: str) -> float:
    """When runs of a deployment were last asked for, in seconds as of `time.time`; 0 where they never were."""
    polled = server.get(f"deployments/{deployment}")["last_polled"]
    return datetime.fromisoformat(polled).timestamp() if polled else 0.0


def _started(server: Server, deployment: str, name: str | None = None, **form: Any) -> str:
    """The id of a new run; a command of the caller's choice, which Prefect would run in a work pool, is sent along."""
    body = {"parameters": {"form": form}, "job_variables": {"command": "touch forged"}}
    body |= {"name": name} if name else {}
    return str(server.ask(f"deployments/{deployment}/create_flow_run", body)["id"])


def _run(server: Server, run: str) -> dict[str, Any]:
    return dict(server.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})[0])


def _over(server: Server, run: str) -> dict[str, Any]:
    is_over = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
    return dict(_eventually(lambda: (one := _run(server, run))["state_type"] in is_over and one, 90))


@pytest.mark.long
def test_the_form_starts_runs_and_keeps_settings_only_when_told(server: Server, finished: Toy) -> None:
    before = (finished.root / "params.yaml").read_bytes()
    with _served(finished, server, "form") as form:
        once = _over(server, _started(server, form, "of mine", evaluate={"top_k": 7}))
        assert (once["name"], once["state_name"]) == ("of mine", "Completed")
        assert "evaluate@a-0 7 conf" in (finished.root / "reports/results.md").read_text()
        assert not (finished.root / "forged").exists()
        assert (finished.root / "params.yaml").read_bytes() == before

        kept = _over(server, _started(server, form, evaluate={"top_k": 8}, keep=True))
        assert (kept["name"], kept["state_name"]) == ("small · seed 0 · b", "Completed")
        assert b"top_k: 8 " in (finished.root / "params.yaml").read_bytes()

        wrong = _over(server, _started(server, form, data="world", data_folder="/nope"))
        assert (wrong["state_name"], "/nope" in wrong["state"]["message"]) == ("Failed", True)
        assert b"/nope" not in (finished.root / "params.yaml").read_bytes()


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example", "content-type": "application/json"},
        {"origin": "http://evil.example", "content-type": "text/plain"},
        {"origin": "null", "content-type": "text/plain"},
        {"host": "evil.example", "content-type": "application/json"},
    ],
)
def test_a_page_of_another_server_can_neither_read_nor_start(server: Server, headers: dict[str, str]) -> None:
    import httpx

    for path in ("deployments/filter", "flow_runs/filter", "flow_runs/"):
        answer = httpx.post(f"{server.api}/{path}", content=b"{}", headers=headers)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)
    asked = {**headers, "access-control-request-method": "POST"}
    assert httpx.options(f"{server.api}/flow_runs/", headers=asked).status_code == 403
    own = {"origin": server.api.removesuffix("/api")} | server.headers
    assert httpx.post(f"{server.api}/deployments/filter", json={}, headers=own).status_code == 200


def test_headers_without_end_are_refused(server: Server) -> None:
    port, start = int(server.api.split(":")[2].partition("/")[0]), b"GET /api/health HTTP/1.1\r\nhost: localhost\r\n"
    before = resident_bytes(server.process.pid)
    for block in (b"x: " + b"a" * 1000 + b"\r\n", b"a" * 1000):
        assert exchange(port, start, *[block * 1000] * 50)[:12] in (b"HTTP/1.1 400", b"")
    assert resident_bytes(server.process.pid) - before < 20_000_000


EVIL = """\
import pathlib
pathlib.Path({mark!r}).touch()
from prefect import flow

@flow
def reproduce(form=None):
    pass
"""


def test_what_a_program_writes_into_a_deployment_runs_no_command(server: Server, finished: Toy, tmp_path: Path) -> None:
    """Neither in the run, nor in the process that serves it, which loads the flow for the hooks of a stopped run."""
    mark, evil = tmp_path / "pwned", tmp_path / "evil"
    (evil / "flows").mkdir(parents=True)
    for name in ("evilflow.py", "flows/flow.py"):
        (evil / name).write_text(EVIL.format(mark=str(mark)))
    step = {"prefect.deployments.steps.run_shell_script": {"script": f"touch {mark}"}}
    changes: dict[str, Any] = {
        "entrypoint": f"{evil}/evilflow.py:reproduce", "path": str(evil), "pull_steps": [step],
    }  # fmt: skip
    with _served(finished, server, "form") as form:
        known = server.get(f"deployments/{form}")
        about = {key: known[key] for key in ("name", "flow_id", "parameters", "parameter_openapi_schema")}
        assert server.ask("deployments/", {**about, **changes, "entrypoint": known["entrypoint"]})["id"] == form
        assert server.get(f"deployments/{form}")["pull_steps"] == [step]
        made = _over(server, _started(server, form, force=["report"]))
        assert made["state_name"] == "Completed"
        assert finished.counts() == ["report"]

        server.send("PATCH", f"deployments/{form}", {key: changes[key] for key in ("entrypoint", "path")})
        finished.forget()
        finished.flag("slow-report")
        run = _started(server, form, force=["report"])
        finished.wait_for("report", 150)
        server.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        assert _over(server, run)["state_name"] == "Cancelled"
    assert not mark.exists()
    assert not (finished.root / "evilflow.py").exists()


ALL_SERVED = """\
import asyncio, os
from uuid import uuid4
import flows, prefect, prefect.flow_engine
from flows import nightly, serve
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import runner

def load(made, **how):
    loaded = [prefect.flow_engine.load_flow(None), asyncio.run(runner.load_flow_from_flow_run(None))]
    print("served", made.name, *[os.path.realpath(one.fn.__code__.co_filename) for one in loaded])

RunnerDeployment.apply = lambda made: uuid4()
nightly.set_alarm = serve._keep_up = lambda *given: None
serve.find_server = lambda root: os.environ["PREFECT_API_URL"]
prefect.serve = load
for name in ("form", "nightly", "form"):
    serve.main(name)
"""


def test_whatever_is_served_takes_its_flow_from_this_clone(tmp_path: Path) -> None:
    """No server is asked: in the process of a run, and for the hooks of one that ended, its record is not read."""
    env = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run([sys.executable, "-c", ALL_SERVED], cwd=HOUSE, env=env, capture_output=True, text=True)
    names = {"form": "flow", "nightly-evaluation": "nightly"}
    served = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("served ")]
    assert [name for name, *_ in served] == ["form", "nightly-evaluation", "form"], done.stderr
    for name, *files in served:
        assert files == [str(HOUSE / f"flows/{names[name]}.py")] * 2


CLIENT = "import flows\nfrom prefect import get_client\nget_client(sync_client=True).request('GET', '/admin/version')\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"PREFECT_SERVER_API_AUTH_STRING": "ü:p w:c"}, "ü:p w:c"),
        ({"PREFECT_SERVER_API_AUTH_STRING": "a:b", "PREFECT_API_AUTH_STRING": "of:mine"}, "of:mine"),
    ],
)
def test_clients_say_the_password_of_our_server_or_that_of_their_user(
    given: dict[str, str], said: str, tmp_path: Path
) -> None:
    heard: list[str | None] = []

    class Listening(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["authorization"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listening) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        env = {**os.environ, "PYTHONPATH": str(HOUSE), "PREFECT_API_URL": f"http://127.0.0.1:{stub.server_port}/api"}
        done = subprocess.run([sys.executable, "-c", CLIENT], cwd=tmp_path, env=env | given, capture_output=True)
        stub.shutdown()
    assert {*heard} == {f"Basic {base64.b64encode(said.encode()).decode()}"}, done.stderr


def test_nobody_gets_in_without_the_password(server: Server) -> None:
    """The runs, forms and schedules of all other tests here do, with what their user has said once."""
    import httpx

    assert httpx.post(f"{server.api}/flow_runs/filter", json={}).status_code == 401
    assert isinstance(server.ask("flow_runs/filter"), list)


def test_the_form_shows_the_settings_and_choices_of_now(server: Server, finished: Toy) -> None:
    with _served(finished, server, "form") as form:
        shown = server.get(f"deployments/{form}")
        assert shown["parameters"]["form"]["evaluate"]["top_k"] == 3
        assert shown["parameter_openapi_schema"]["definitions"]["Form"]["additionalProperties"] is False
        assert "another" not in str(shown["parameter_openapi_schema"])
        store.write_json(finished.root / "conf/method/another.yaml", {"name": "another"})
        assert _eventually(lambda: "another" in str(server.get(f"deployments/{form}")["parameter_openapi_schema"]), 60)


SLOW_TO_REGISTER = """\
import sys, time
if sys.orig_argv[1:3] == ["-m", "flows.serve"] and sys.orig_argv[-1] == "register":
    open(".scratch/registering", "w").close()
    time.sleep(60)
"""


def test_a_form_that_is_being_renewed_leaves_no_process_behind(server: Server, finished: Toy, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_REGISTER)
    with _served(finished, server, "form", PYTHONPATH=f"{tmp_path}{os.pathsep}{HOUSE}"):
        store.write_json(finished.root / "conf/method/another.yaml", {"name": "another"})
        assert _eventually((finished.root / ".scratch/registering").exists)


def test_a_cancelled_run_ends_at_once_and_no_stage_is_green(server: Server, finished: Toy) -> None:
    finished.flag("slow-report")
    with _served(finished, server, "form") as form:
        run = _started(server, form, force=["report"])
        finished.wait_for("report", 60)
        with busy():
            started = time.monotonic()
            server.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
            assert _over(server, run)["state_name"] == "Cancelled"
            assert time.monotonic() - started < 15
        tasks = server.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        states = {one["name"]: one["state_name"] for one in tasks}
        assert states.pop("report") == "Stopped"
        assert set(states.values()) == {"Cached"}


ALARM = """\
from flows.nightly import set_alarm
from prefect.automations import Automation

set_alarm("00000000-0000-4000-8000-000000000000")
alarm = Automation.read(name="nightly alarm")
print(type(alarm.actions[0]).__name__, alarm.description)
alarm.description = "mine"
alarm.update()
"""


def test_an_alarm_that_its_user_has_changed_stays_so(server: Server, finished: Toy) -> None:
    def said(**env: str) -> str:
        env = finished.env(**server.env, **env)
        command = [sys.executable, "-c", ALARM]
        return subprocess.run(command, cwd=finished.root, env=env, capture_output=True, text=True, check=True).stdout

    assert said().startswith("DoNothing Fires when")
    assert said() == "DoNothing mine\n"
    assert said(NIGHTLY_WEBHOOK="http://127.0.0.1:9/").startswith("CallWebhook Fires when")


def test_a_dead_address_costs_seconds_only(finished: Toy) -> None:
    started = time.monotonic()
    done = finished.flow("--force", "report", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 0
    assert "no Prefect server answers at http://127.0.0.1:9/api; going on with one of this run." in done.stderr
    assert time.monotonic() - started < 60
    assert finished.counts() == ["report"]


def _recorded(toy: Toy) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Flow runs and task runs in the clone's own database, as a server that is started now shows them."""
    server = Server(toy.root / ".scratch/prefect")
    try:
        return server.ask("flow_runs/filter"), server.ask("task_runs/filter")
    finally:
        server.kill()


def test_a_run_without_a_server_is_recorded_with_every_stage_and_the_next_one_closes_a_killed_one(toy: Toy) -> None:
    toy.flag("slow-train@a-0")
    killed = toy.start("--name", "to be killed")
    toy.wait_for("train@a-0", 90)
    time.sleep(2)  # Events reach the server.
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    toy.flag("slow-train@a-0", on=False)

    done = toy.flow(**PASSWORD)  # Of the run's own server, too.
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    flows, tasks = _recorded(toy)
    by_name = {run["name"]: run for run in flows}
    assert set(by_name) == {"to be killed", "small · seed 0 · b"}
    assert not {run["state_type"] for run in (*flows, *tasks)} & {"PENDING", "RUNNING", "CANCELLING"}
    assert by_name["to be killed"]["state_name"] == "Crashed"
    here = by_name["small · seed 0 · b"]
    assert here["state_name"] == "Completed"
    states = {run["name"]: run["state_name"] for run in tasks if run["flow_run_id"] == here["id"]}
    assert set(states) == set(NAMES)
    assert (states["data"], states["train@a-0"], states["report"]) == ("Cached", "Completed", "Completed")


BEGIN = """\
import flows
from pathlib import Path
from types import SimpleNamespace
from flows.flow import _begin
from prefect import flow

@flow
def begin():
    _begin(SimpleNamespace(root=Path.cwd(), title="here"))

begin()
"""


def test_whatever_killed_runs_of_this_clone_have_left_open_is_closed(server: Server, finished: Toy) -> None:
    """In a state in which no stage began, too; what other clones have open stays."""
    flow = server.ask("flows/", {"name": "left"})["id"]

    def left(state: str, root: Path) -> tuple[str, str]:
        """The ids of a flow run and of its stage at work."""
        given = {"flow_id": flow, "tags": [f"clone:{root}"], "state": {"type": state}}
        run = str(server.ask("flow_runs/", given)["id"])
        stage = {"flow_run_id": run, "task_key": "stage", "dynamic_key": "0", "state": {"type": "RUNNING"}}
        return run, str(server.ask("task_runs/", stage)["id"])

    ours = [left(state, finished.root) for state in ("PENDING", "RUNNING", "CANCELLING")]
    other = left("PENDING", finished.root / "other")
    env = finished.env(**server.env)
    subprocess.run([sys.executable, "-c", BEGIN], cwd=finished.root, env=env, capture_output=True, check=True)

    def state(run: str, stage: str) -> tuple[str, str]:
        return _run(server, run)["state_type"], server.get(f"task_runs/{stage}")["state_type"]

    assert [state(*one) for one in ours] == [("CRASHED", "CRASHED")] * 3
    assert state(*other) == ("PENDING", "RUNNING")


def _stopped(run: "subprocess.Popen[str]", stop: Callable[[], None]) -> str:
    """What a run has said, which must have ended soon after it was stopped."""
    started = time.monotonic()
    stop()
    output, _ = run.communicate(timeout=100)
    assert time.monotonic() - started < 15
    return output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_cancelled_and_its_stage_stopped(server: Server, finished: Toy, number: int) -> None:
    finished.flag("slow-report")
    run = finished.start("--force", "report", "--name", f"stopped by {number}", **server.env)
    finished.wait_for("report", 60)
    with busy():
        output = _stopped(run, lambda: os.killpg(run.pid, number))
    assert run.returncode == 128 + number, output
    assert "stopped. Run again to go on where it stopped." in output
    assert not any(word in output for word in ("Traceback", "ERROR", "Crash", "aborted", "executed in"))
    assert finished.processes() == []

    (found,) = [one for one in server.ask("flow_runs/filter") if one["name"] == f"stopped by {number}"]
    assert found["state_name"] == "Cancelled"
    tasks = {
        one["name"]: one["state_name"] for one in server.ask("task_runs/filter") if one["flow_run_id"] == found["id"]
    }
    assert tasks.pop("report") == "Stopped"
    assert set(tasks.values()) == {"Cached"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stopped_while_its_server_starts_leaves_nothing(finished: Toy, number: int) -> None:
    before = (finished.root / "params.yaml").read_bytes()
    run = finished.start("--force", "report", "--set", "evaluate.num_bootstrap=700")
    assert _eventually(lambda: any("flows.server" in words for words in finished.processes()), 60)
    with busy():
        output = _stopped(run, lambda: os.kill(run.pid, number))
    assert run.returncode == 128 + number, output
    assert output.endswith("stopped. Run again to go on where it stopped.\n")
    assert "Traceback" not in output
    assert (finished.root / "params.yaml").read_bytes() == before
    assert _eventually(lambda: finished.processes() == [], 15), finished.processes()


def test_a_stop_does_not_wait_for_a_server_that_hangs(server: Server, finished: Toy) -> None:
    finished.flag("slow-report")
    run = finished.start("--force", "report", **server.env)
    finished.wait_for("report", 60)
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        output = _stopped(run, lambda: os.killpg(run.pid, signal.SIGINT))
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    assert run.returncode == 130, output
    assert output.endswith("stopped. Run again to go on where it stopped.\n")
    assert "warning" not in output
    assert finished.processes() == []


def test_a_stop_does_not_wait_for_a_server_that_hangs_from_the_start(finished: Toy) -> None:
    asked = threading.Event()

    class Hanging(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/health":
                self.send_response(200)
                self.end_headers()
            else:
                asked.set()
                time.sleep(60)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as hanging:
        hanging.block_on_close = False
        threading.Thread(target=hanging.serve_forever, daemon=True).start()
        run = finished.start("--force", "report", PREFECT_API_URL=f"http://127.0.0.1:{hanging.server_port}/api")
        assert asked.wait(60)
        time.sleep(0.5)
        output = _stopped(run, lambda: os.killpg(run.pid, signal.SIGINT))
        hanging.shutdown()
    assert run.returncode == 130, output
    assert output.endswith("stopped. Run again to go on where it stopped.\n")
    assert finished.counts() == []


def _odd(how: str, connection: socket.socket) -> None:
    """A server of that kind: bytes that are no HTTP, a byte a second, nothing at all, or `/health` and nothing else."""
    with contextlib.suppress(OSError), connection:
        asked = connection.recv(65536)
        if how == "slowhealth" and asked.startswith(b"GET /api/health"):
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            return
        if how == "garbage":
            connection.sendall(b"\0\xff" * 10 + b"\r\n\r\n")
            return
        for byte in b"HTTP/1.1 200 OK\r\nx: " + b"a" * 600 if how == "drip" else ():
            connection.sendall(bytes([byte]))
            time.sleep(1)
        while connection.recv(65536):  # It takes what comes, and never answers.
            pass


@contextlib.contextmanager
def _odd_server(how: str) -> Iterator[str]:
    """The address of such a server's API."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listening.accept()
                    threading.Thread(target=_odd, args=(how, one), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", ["garbage", "drip", "silence"])
def test_a_server_that_talks_nonsense_or_hangs_is_none(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run does then, it does with an address that is dead."""
    with _odd_server(how) as api:
        monkeypatch.setenv("PREFECT_API_URL", api)
        started = time.monotonic()
        assert find_server(tmp_path) is None
        assert time.monotonic() - started < 2 * SECONDS_TO_ANSWER
    warning = f"warning: no Prefect server answers at {api}; going on with one of this run.\n"
    assert capsys.readouterr().err == warning


def test_a_server_that_is_well_and_answers_nothing_costs_seconds_and_one_warning(finished: Toy) -> None:
    with _odd_server("slowhealth") as api:
        started = time.monotonic()
        done = finished.flow("--force", "report", PREFECT_API_URL=api)
        took = time.monotonic() - started
    assert (done.returncode, done.stderr.count("warning")) == (0, 1), done.stderr
    assert "Prefect did not begin the run within 10 s; going on without it." in done.stderr
    assert "Traceback" not in done.stderr
    assert finished.counts() == ["report"]
    assert took < 60


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


def test_a_run_is_made_while_others_write_to_the_database(server: Server) -> None:
    """Prefect alone answers 503 to some 50 of 60 such requests beside six writers, and its pages do not ask again."""
    flow = server.ask("flows/", {"name": "busy"})["id"]
    deployment = server.ask("deployments/", {"name": "busy", "flow_id": flow})["id"]
    written: list[str] = []
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            written.append(server.ask("flow_runs/", {"flow_id": flow})["id"])

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write) for _ in range(3)]
        try:
            made = [server.ask(f"deployments/{deployment}/create_flow_run")["id"] for _ in range(20)]
        finally:
            is_over.set()
    assert [one.exception() for one in writers] == [None] * 3
    assert len({*made, *written}) == 20 + len(written)
    assert written
