"""A run started, watched, cancelled and compared by its user: `make ui` and its pages in a real browser.

The pictures stay in the folder that BROWSER_PICTURES names.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.server import LOG
from tests.pipeline.test_prefect import _eventually
from tests.report.browser import Browser
from tests.skips import needs_chromium
from tests.stages.clone import Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.servers, pytest.mark.timeout(900), needs_chromium]

NAME = """[...document.querySelectorAll(".p-label")].find(
    one => one.innerText.startsWith("Run Name"))?.querySelector("input")"""
ROW = """[...document.querySelectorAll("[role=row]")].find(
    one => one.innerText.includes("{name}") && one.querySelector(".ag-checkbox-input"))"""
SEEN = """[...document.querySelectorAll("[role=columnheader]")].filter(one => {
    const box = one.getBoundingClientRect(), x = box.left + Math.min(box.width / 2, 40);
    return one.contains(document.elementFromPoint(x, box.top + box.height / 2)); }).map(one => one.innerText.trim())"""
STATE = "document.querySelector('.state-badge')?.innerText.trim()"


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone of which nothing has run."""
    made = Clone.make(tmp_path / "clone")
    subprocess.run(["git", "init", "-q", str(made.root)], check=True)
    return made


def _answer(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def _ui(clone: Clone) -> Iterator[dict[str, str]]:
    """The addresses that `make ui` prints, while it runs."""
    env = {**clone.env(), "BREADCRUMB_TRACKING": "on", "PORT_PREFECT": _free_port(), "PORT_MLFLOW": _free_port()}
    env |= {"PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR"}
    log = clone.root / ".scratch/ui.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.ui"], cwd=clone.root, env=env, stdout=output, start_new_session=True
        )
    try:
        assert _eventually(lambda: "Form:" in log.read_text(), 120), log.read_text()
        yield dict(re.findall(r"^(\w+): +(\S+)$", log.read_text(), re.MULTILINE))
    finally:
        process.terminate()
        process.wait(30)


class Pages:
    """The pages of Prefect and MLflow, with a picture of each step."""

    def __init__(self, browser: Browser, pictures: Path, log: Path) -> None:
        self.browser, self.pictures, self.log = browser, pictures, log
        pictures.mkdir(parents=True, exist_ok=True)

    def picture(self, name: str) -> None:
        """Keep what the page shows now."""
        self.browser.picture(self.pictures / f"{name}.png")

    def start(self, form: str, name: str) -> None:
        """Fill in the form, press its button and go to the page of the run."""
        self.browser.open(form)
        self.browser.click(NAME)
        self.browser.run("document.activeElement.select()")  # Prefect has filled in a name of its own.
        self.browser.write(name)
        self.picture(f"form of {name}")
        self.browser.click_on("Submit")
        with contextlib.suppress(TimeoutError):  # The notice goes away by itself.
            self.browser.click_on("View run", seconds=10)
        time.sleep(2)
        if "/runs/flow-run/" not in self.browser.run("location.href"):
            server = form.split("/deployments/")[0]
            asked = {"flow_runs": {"name": {"any_": [name]}}}
            found = _eventually(lambda: _answer(f"{server}/api/flow_runs/filter", asked), 60)
            self.picture(f"answer to {name}")
            assert found, f"no run was made: {self.browser.problems}\n{self.log.read_text()}\n{self.browser.text()}"
            self.browser.open(f"{server}/runs/flow-run/{found[0]['id']}")

    def ends(self, state: str, seconds: float) -> None:
        """Wait until the run of this page is in that state."""
        until = time.monotonic() + seconds
        while (found := self.browser.run(STATE)) != state:
            assert time.monotonic() < until, f"the run is {found}, not {state}"
            time.sleep(0.5)

    def tab(self, name: str) -> None:
        """Open a tab of the run's page."""
        self.browser.click_on(name)


def test_a_run_from_the_form_to_the_comparison(clone: Clone, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("BROWSER_PICTURES") or tmp_path / "pictures")
    with _ui(clone) as pages, Browser(1400, 1000, calm=True) as browser:
        user = Pages(browser, pictures, clone.root / LOG)
        user.start(pages["Form"], "my first run")
        _watch_to_success(user)
        _open_the_report(user, clone)
        clone.change("conf/scale/smoke.yaml", "num_steps: 3", "num_steps: 400")
        user.start(pages["Form"], "my second run")
        _cancel_in_training(user, clone)
        _compare_in_mlflow(user, pages["MLflow"])


def _watch_to_success(user: Pages) -> None:
    browser = user.browser
    browser.wait_for("my first run")
    browser.wait_for("Running stage 'plan'", 120)
    user.picture("log of the first run")
    user.tab("Task Runs")
    browser.wait_for("train@search_r1_ppo-0", 300)
    user.picture("tasks of the first run")
    user.ends("Completed", 300)
    user.picture("end of the first run")
    user.tab("Artifacts")
    browser.click_on("result-table", ".artifact-card__title")
    browser.wait_for("Search-R1-PPO")
    user.picture("result of the first run")


def _open_the_report(user: Pages, clone: Clone) -> None:
    user.browser.open(clone.root / "reports/index.html")
    user.browser.wait_for("Search-R1-PPO")
    user.picture("report of the first run")


def _cancel_in_training(user: Pages, clone: Clone) -> None:
    browser = user.browser
    records = clone.root / ".scratch/tracking"
    assert _eventually(lambda: any("batch" in path.read_text() for path in records.glob("train@search*.jsonl")), 300)
    browser.click_on("Cancel")
    user.picture("cancel")
    browser.click_on("Confirm")
    user.ends("Cancelled", 60)
    user.tab("Task Runs")
    browser.wait_for("Stopped")
    user.picture("cancelled run")
    states = browser.run("[...document.querySelectorAll('.state-list-item, .p-list-item')].map(one => one.innerText)")
    found = {text.split("\n")[0]: text.split("\n")[1] for text in states}
    assert found["train@search_r1_ppo-0"] == "Stopped", found
    assert not {"evaluate@search_r1_ppo-0", "report"} & found.keys(), "nothing that needs the cancelled one"


def _compare_in_mlflow(user: Pages, address: str) -> None:
    user.browser.open(address)
    user.browser.wait_for("my first run")
    user.browser.wait_for("my second run")
    user.picture("runs in MLflow")
    assert {"best/em", "params.scale", "params.seeds"} <= set(user.browser.run(SEEN)), "hidden on the first page"
    for name in ("my first run", "my second run"):
        user.browser.click(ROW.format(name=name) + "?.querySelector('.ag-checkbox-input')")
    user.browser.click_on("Compare")
    user.browser.wait_for("Comparing 2 Runs")
    user.browser.wait_for("params.scale")
    user.picture("comparison in MLflow")
    shown = user.browser.text()
    assert "my first run" in shown
    assert "my second run" in shown
