"""Stops runs of the real pipeline beside four busy loops, and says how many seconds each takes to end.

    python -m tests.benchmarks.bench_stops [--tries 20] [--folder FOLDER]

A clone is run once undisturbed, by `make smoke`. Each try takes away the results of one stage and of the report,
starts the run anew, and stops it in that stage, or while the run's own Prefect server starts. It is stopped
by Ctrl-C in a terminal (SIGINT to `make` and all below it), by SIGINT or SIGTERM to the run alone, by SIGTERM to
`make`, or by cancel, where `make ui` has started it from its form. From that moment on four processes that only count
stand beside it.

Exit 1 unless each run ends within 15 seconds of its stop, without a process left and without an alarming word in the
terminal, leaves git nothing to see and DVC unlocked, and the next run gives the bytes of the undisturbed one. No run
may be open in Prefect or MLflow at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from flows import STOPPED
from tests.server.running import free_port
from tests.stages.clone import Clone

LIMIT_S, PATIENCE_S = 15.0, 200.0
LOOPS = 4
ALARMING = re.compile(
    r"Traceback|Exception|ERROR|Error(?! 1\d\d$)|error:|[Cc]rash|abort|warning|fell away", re.MULTILINE
)
KINDS = {
    "Ctrl-C": ("terminal", signal.SIGINT),
    "SIGINT": ("run", signal.SIGINT),
    "SIGTERM": ("run", signal.SIGTERM),
    "SIGTERM to make": ("make", signal.SIGTERM),
}
CANCEL = "cancel"
TRIES = (
    ("Ctrl-C", "server"), ("SIGTERM", "server"), (CANCEL, "plan"),
    ("Ctrl-C", "plan"), ("SIGTERM to make", "base"), (CANCEL, "train"),
    ("SIGINT", "train"), ("SIGTERM", "train"), (CANCEL, "evaluate"),
    ("Ctrl-C", "evaluate"), ("SIGTERM", "plan"), (CANCEL, "base"),
    ("SIGINT", "base"), ("SIGTERM to make", "evaluate"), (CANCEL, "train"),
    ("Ctrl-C", "train"), ("SIGTERM to make", "server"), (CANCEL, "evaluate"),
    ("SIGINT", "server"), ("SIGTERM", "train"),
)  # fmt: skip
"""How a run is stopped, and what works at that moment; 7 by SIGINT, 7 by SIGTERM, 6 by cancel."""


@dataclass
class Row:
    """One try: seconds from the stop to the end of the run and of its last process, and what was wrong."""

    kind: str
    moment: str
    ended_s: float = 0.0
    gone_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = "; ".join(self.faults) or "-"
        return f"{self.kind:16} {self.moment:9} {self.ended_s:8.1f} {self.gone_s:8.1f}  {wrong}"


class Place:
    """A clone with a finished run, its settings committed, and a copy of what a try takes away.

    Args:
        clone: it has run, or `make smoke` runs it now.
        kept: folder for the copy; must not exist.
    """

    def __init__(self, clone: Clone, kept: Path) -> None:
        self.clone, self.root, self.kept, self.ui = clone, clone.root, kept, ""
        if not (self.root / "dvc.lock").exists():
            self.smoke()
        self.wanted = hashes_of(clone)
        for name in ("artifacts", ".dvc/cache"):
            shutil.copytree(self.root / name, kept / name, symlinks=True)
        shutil.copyfile(self.root / "dvc.lock", kept / "dvc.lock")

    def forget(self, *groups: str) -> None:
        """Take away the results of these stages, also what DVC remembers of them."""
        for name in ("artifacts", ".dvc/cache", ".scratch/work"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for name in ("artifacts", ".dvc/cache"):
            shutil.copytree(self.kept / name, self.root / name, symlinks=True)

        shutil.rmtree(self.root / ".dvc/cache/runs", ignore_errors=True)
        lock = yaml.safe_load((self.kept / "dvc.lock").read_text(encoding="utf-8"))
        for name in [name for name in lock["stages"] if name.partition("@")[0] in groups]:
            for out in lock["stages"].pop(name).get("outs", []):
                path = self.root / out["path"]
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False), encoding="utf-8")
        (self.root / ".scratch/dvc.lock").unlink(missing_ok=True)
        self.git("commit", "--quiet", "--all", "--allow-empty", "--message", "before a try")

    def git(self, *words: str) -> str:
        """What git prints."""
        who = ["-c", "user.name=A reader", "-c", "user.email=reader@example.org"]
        done = subprocess.run(["git", *who, *words], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`make words` as at a terminal; its output goes to `.scratch/said.txt`."""
        command, env = self.clone.make_words(*words)
        (self.root / ".scratch").mkdir(exist_ok=True)
        with (self.root / ".scratch/said.txt").open("w") as said:
            return subprocess.Popen(
                command, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, text=True,
                start_new_session=True,
                # What a script runs in its background has Ctrl-C ignored and hands that on.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What the last command printed."""
        return (self.root / ".scratch/said.txt").read_text(encoding="utf-8", errors="replace")

    def smoke(self) -> None:
        """Run `make smoke` undisturbed.

        Raises:
            AssertionError: it did not end well.
        """
        code = self.start("smoke").wait(PATIENCE_S * 2)
        assert code == 0, self.said

    def stop(self, kind: str, moment: str, pause_s: float) -> Row:
        """Start a run, stop it at this moment, watch it end, and let the next one finish."""
        self.forget("report", *([] if moment == "server" else [moment]))
        before, row = set(processes_in(self.root)), Row(kind, moment)
        ended, stop = self._by_page() if kind == CANCEL else self._by_signal(kind)
        self._wait_for(f"flows.{moment}" if moment == "server" else f"tasks.stages.{moment}", before)
        with busy():
            time.sleep(pause_s)
            stop()
            self._watch(row, ended, before)
        if kind != CANCEL and (STOPPED not in self.said or ALARMING.search(self.said)):
            row.faults.append(f"the terminal said {self.said[-1500:]}")

        self._check(row)
        return row

    def _by_signal(self, kind: str) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Start `make smoke`; how to see that it has ended, and how to stop it."""
        to, number = KINDS[kind]
        made = self.start("smoke")

        def stop() -> None:
            family = psutil.Process(made.pid).children()
            for process in {"terminal": [psutil.Process(made.pid), *family], "run": family}.get(to, []):
                process.send_signal(number)
            if to == "make":
                made.send_signal(number)

        return lambda: made.poll() is not None, stop

    def _by_page(self) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Start a run by the form; how to see that it has ended, and how to cancel it."""
        api, deployment = self.ui.split()
        form = {"scale": "smoke", "data": "smoke"}
        made = _ask(f"{api}/deployments/{deployment}/create_flow_run", parameters={"form": form})
        run = f"{api}/flow_runs/{made['id']}"

        def stop() -> None:
            _ask(f"{run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})

        return lambda: httpx.get(run, timeout=60).json()["state_type"] == "CANCELLED", stop

    def _wait_for(self, module: str, before: set[int]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not any(module in words for pid, words in processes_in(self.root).items() if pid not in before):
            assert time.monotonic() < until, f"{module} did not start: {self.said}"
            time.sleep(0.05)

    def _watch(self, row: Row, ended: Callable[[], bool], before: set[int]) -> None:
        """Note when the run has ended and when its last process has."""
        stopped = time.monotonic()
        while (passed := time.monotonic() - stopped) < 4 * LIMIT_S:
            row.ended_s = row.ended_s or (passed if ended() else 0.0)
            left = [words for pid, words in processes_in(self.root).items() if pid not in before]
            if row.ended_s and not left:
                row.gone_s = passed
                break
            time.sleep(0.05)
        else:
            row.faults.append(f"after {passed:.0f} s {left} still work")
        if not 0 < row.gone_s <= LIMIT_S:
            row.faults.append("too slow")

    def _check(self, row: Row) -> None:
        """What the stopped run leaves behind, and what the next one makes of it."""
        from dvc.repo import Repo

        if shown := self.git("status", "--porcelain", "--", ":!dvc.lock"):
            row.faults.append(f"git sees {shown.split()}")
        with Repo(str(self.root)) as repo, repo.lock:
            pass
        try:
            self.smoke()
        except AssertionError as error:
            row.faults.append(f"the next run failed: {error}")
            return
        if other := differing(hashes_of(self.clone), self.wanted):
            row.faults.append(f"other bytes: {other}")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """`make ui`, while the block runs."""
        before = set(processes_in(self.root))
        ui = self.start("ui", f"PORT_PREFECT={free_port()}", f"PORT_MLFLOW={free_port()}")
        try:
            until = time.monotonic() + PATIENCE_S
            while not (found := re.search(r"Form: +(\S+)/deployments/deployment/([0-9a-f-]{36})", self.said)):
                assert time.monotonic() < until, self.said
                time.sleep(0.2)
            self.ui = f"{found[1]}/api {found[2]}"
            yield
        finally:
            ui.send_signal(signal.SIGTERM)
            ui.wait(60)
        assert not set(processes_in(self.root)) - before, processes_in(self.root)

    def left_open(self) -> list[str]:
        """Runs that Prefect's or MLflow's database shows as running, once all records are sent."""
        assert self.clone.run("tasks.runner.upload", BREADCRUMB_TRACKING="on").returncode == 0
        asked = {
            "prefect/prefect.db": "SELECT name FROM {} WHERE state_type IN ('RUNNING', 'CANCELLING', 'PENDING')",
            "mlflow/mlflow.db": "SELECT name FROM {} WHERE status = 'RUNNING'",
        }
        tables = {"prefect/prefect.db": ("flow_run", "task_run"), "mlflow/mlflow.db": ("runs",)}
        return [
            f"{table} {name}"
            for path, query in asked.items()
            for table in tables[path]
            for (name,) in rows_of(self.root / ".scratch" / path, query.format(table))
        ]


def hashes_of(clone: Clone) -> dict[str, str]:
    """Of every file of the results."""
    files = {**clone.files("artifacts"), "results.csv": (clone.root / "reports/results.csv").read_bytes()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def differing(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Names of the files that are not the same, or that only one side has."""
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def processes_in(root: Path) -> dict[int, str]:
    """Those that work in a clone, whoever started them, with their words."""
    found = {}
    for process in psutil.process_iter(["cwd", "cmdline", "status"]):
        if process.info["cwd"] == str(root) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found[process.pid] = " ".join(process.info["cmdline"] or [])
    return found


def rows_of(database: Path, query: str) -> list[Any]:
    """Rows of a database that nobody writes now."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        return opened.execute(query).fetchall()


def _ask(url: str, **body: Any) -> Any:
    until = time.monotonic() + 30  # Prefect answers 503 while its database of one file is busy.
    while (answer := httpx.post(url, json=body, timeout=60)).status_code == 503 and time.monotonic() < until:
        time.sleep(0.5)
    answer.raise_for_status()
    return answer.json()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Processes that take all the time they get, at normal priority, while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def stops(place: Place, tries: list[tuple[str, str]]) -> Iterator[Row]:
    """Every try, those of the form last because `make ui` stands beside them."""
    pauses = itertools.cycle((0.3, 1.5, 0.8, 2.2))
    for kind, moment in (one for one in tries if one[0] != CANCEL):
        yield place.stop(kind, moment, next(pauses))
    cancels = [one for one in tries if one[0] == CANCEL]
    with place.opened() if cancels else contextlib.nullcontext():
        for kind, moment in cancels:
            yield place.stop(kind, moment, next(pauses))


def fresh(folder: Path) -> Clone:
    """A clone with the smallest table, whose `make smoke` changes `params.yaml` for itself, committed."""
    clone = Clone.make(folder, smoke=False)
    for key, value in {"systems": "[base, search_r1_ppo]", "seeds": "[0]", "num_bootstrap": "100"}.items():
        clone.set(key, value)
    clone.make_words()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    return clone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=len(TRIES))
    parser.add_argument("--folder", type=Path, help="keep the clone here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (given.folder or Path(made)).resolve()
        place = Place(fresh(folder / "clone"), folder / "kept")
        print(f"{'stopped by':16} {'in':9} {'ended, s':>8} {'gone, s':>8}  wrong", flush=True)
        rows = []
        for row in stops(place, list(TRIES[: given.tries])):
            rows.append(row)
            print(row, flush=True)
        left = place.left_open()
    good = sum(not row.faults for row in rows)
    slowest = max(row.gone_s for row in rows)
    print(f"{good} of {len(rows)} runs ended well, the slowest after {slowest:.1f} s; left open: {left or 'none'}")
    return 0 if good == len(rows) and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
