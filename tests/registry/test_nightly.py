"""Nights on a real Prefect server: on their schedule, with an injected regression, and unmoved by other runs."""

import datetime
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tasks import store
from tasks.data.records import question_row, read_questions
from tasks.registry import nights
from tests.pipeline.test_prefect import Server, _eventually
from tests.registry.test_registry import Clone as Report
from tests.registry.test_registry import in_this_process
from tests.stages.clone import Clone
from tests.tool.conftest import Learned, learned  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.servers, pytest.mark.timeout(900)]


ALARM = "known-0 v1: outside the interval of the last good night: em 1.000 ["


class Told(http.server.BaseHTTPRequestHandler):
    """What an automation calls; keeps the texts that it was sent."""

    texts: list[str] = []  # noqa: RUF012 - shared by all requests

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.texts.append(json.loads(body)["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def told() -> Iterator[str]:
    """The address of the webhook."""
    Told.texts.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


@pytest.fixture
def clone(tmp_path: Path, learned: Learned) -> Clone:  # noqa: F811
    """A clone whose only registered policy knows the three questions of the night."""
    made = Clone.make(tmp_path / "clone")
    subprocess.run(["git", "init", "-q", str(made.root)], check=True)
    report = Report(made.root, learned)
    report.add("known", "1" * 12)
    assert "known-0 is version 1" in in_this_process(made.root, "register")

    data = tmp_path / "data"
    data.mkdir()
    shutil.copyfile(learned.corpus, data / "corpus.jsonl")
    known = {question.id for question in learned.questions}
    others = [one for one in read_questions(learned.corpus.parent / "questions.jsonl") if one.id not in known][:40]
    asked = [replace(question, split="test") for question in learned.questions]
    rest = [replace(one, split="train") for one in others]
    store.write_jsonl(data / "questions.jsonl", map(question_row, [*asked, *rest]))
    # A minute that is not over when the server is there, and others in case it is; all are far enough from each other
    # that the first night is over, or at least has begun, before the next one would.
    first = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=80)).minute
    minutes = ",".join(str((first + more) % 60) for more in range(0, 60, 5))
    for old, new in (
        ("cron: 0 3 * * *", f"cron: {minutes} * * * *"),
        ("scale: laptop", "scale: smoke"),
        ("data: world", "data: folder"),
        ("data_folder: conf/data/none.txt", f"data_folder: {data}"),
    ):
        made.change("conf/nightly/default.yaml", old, new)
    return made


class Nightly:
    """What `make serve` serves."""

    def __init__(self, server: Server, number: str) -> None:
        self.server, self.number = server, number

    def scheduled(self) -> dict[str, Any]:
        """The first run that the schedule has made, when it is over; it needs sqlalchemy below 2.1.

        The schedule makes no more of them once this one has begun.
        """
        asked = {"sort": "START_TIME_ASC", "flow_runs": {"start_time": {"is_null_": False}}}
        begun = _eventually(lambda: self.server.ask("flow_runs/filter", asked), 400)
        self.server.ask(f"deployments/{self.number}/pause_deployment")
        return self._over(begun[0]["id"])

    def now(self) -> dict[str, Any]:
        """A run that is asked for now, when it is over."""
        return self._over(self.server.ask(f"deployments/{self.number}/create_flow_run")["id"])

    def _over(self, number: str) -> dict[str, Any]:
        asked = {"flow_runs": {"id": {"any_": [number]}}}
        is_over = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")

        def found() -> list[dict[str, Any]]:
            return [run for run in self.server.ask("flow_runs/filter", asked) if run["state_type"] in is_over]

        return dict(_eventually(found, 400)[0])


@contextmanager
def _served(clone: Clone, server: Server, webhook: str) -> Iterator[Nightly]:
    process = clone.start("flows.serve", "nightly", **server.env, NIGHTLY_WEBHOOK=webhook)
    try:
        found = _eventually(lambda: server.ask("deployments/filter"), 60)
        yield Nightly(server, found[0]["id"])
    finally:
        process.terminate()
        process.wait(30)


def test_nights_on_their_schedule_and_two_regressions(clone: Clone, tmp_path: Path, told: str) -> None:
    server = Server(tmp_path / "prefect")
    try:
        with _served(clone, server, told) as served:
            first = served.scheduled()
            assert (first["state_name"], first["state"]["message"]) == (
                "Completed",
                "no alarm: known-0 v1; 3 questions",
            )
            _check_the_page(clone, served)
            _check_an_unchanged_night(clone)
            assert Told.texts == []
            _check_a_changed_scorer(clone, served)
            _check_a_changed_weight(clone)
    finally:
        server.kill()


def _check_an_unchanged_night(clone: Clone) -> None:
    """After an afternoon with other settings, by `make nightly`."""
    clone.set("scale", "laptop")
    clone.set("retriever", "dense")
    shutil.rmtree(clone.root / "artifacts")
    said = clone.run("tasks.registry.nightly")
    assert said.returncode == 0, said.stderr
    assert said.stdout.endswith("no alarm: known-0 v1; 3 questions\n")
    assert "Error" not in said.stdout + said.stderr
    one, two = nights.read(clone.root)[-2:]
    assert one.cells == two.cells
    assert one.cells[0].metrics["em"].mean == 1


def _check_the_page(clone: Clone, served: Nightly) -> None:
    """The trend as table and as plot, and what each step has said."""
    shown = {one["key"]: one for one in served.server.ask("artifacts/latest/filter")}
    assert shown["nightly-trend"]["data"] == (clone.root / nights.FOLDER / nights.TREND).read_text(encoding="utf-8")
    assert shown["nightly-plot"]["type"] == "image"

    def said() -> set[str]:
        return {one["message"] for one in served.server.ask("logs/filter")}

    steps = {"questions and index ...", "known-0 v1 plays ...", "no alarm: known-0 v1; 3 questions"}
    assert _eventually(lambda: steps <= said()), said()


def _check_a_changed_scorer(clone: Clone, served: Nightly) -> None:
    right, wrong = "return float(prediction is not None", "return float(prediction is None"
    clone.change("tasks/text.py", right, wrong)
    _check_alarm(served.now(), ALARM)
    clone.change("tasks/text.py", wrong, right)


def _check_a_changed_weight(clone: Clone) -> None:
    (weights,) = (clone.root / ".scratch/mlflow").rglob("model.safetensors")
    tensors = {name: tensor * 0.5 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    before = nights.read(clone.root)
    said = clone.run("tasks.registry.nightly")
    assert (said.returncode, "its weights have the hash" in said.stderr) == (1, True), said.stdout + said.stderr
    assert nights.read(clone.root) == before
    said = clone.run("tasks.registry.nightly", "--accept", "a new policy")
    assert "is what the next one is compared with" in said.stdout, said.stderr
    assert nights.read(clone.root)[-1].is_good


def _check_alarm(run: dict[str, Any], text: str) -> None:
    """The run has failed, and the automation has told it, with the cells."""
    assert run["state_name"] == "Failed"
    assert run["state"]["message"].startswith(text)
    assert _eventually(lambda: f"{run['name']}: {run['state']['message']}" in Told.texts), Told.texts
