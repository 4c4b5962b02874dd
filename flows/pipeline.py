"""One run of the pipeline in one clone: its lock, its settings, the order of its stages, and what it says.

Prefect is not needed here, and no stage is known by name: `flows.flow` runs the same `Run` with a task for each stage.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from flows import STOPPED, dag
from flows.child import Outcome, Say, Stopper, execute
from tasks import conf, planned, writable
from tasks.params import edit, lent, places
from tasks.report.terminal import TABLE, headline, times
from tasks.runner import ledger, record, runs
from tasks.runner.lock import BUSY, HOLDER, PIPELINE, pipeline_pid

REPORT = Path("reports/index.html")
SECONDS_FOR_DVC = 30
DVC_IS_BUSY = "is busy, it is being blocked by"
Submit = Callable[[str], "Future[Any]"]


@dataclass
class Run:
    """A prepared run: its settings are written, its lock is held, its graph is read.

    Attributes:
        root: root of the clone.
        key: names the run; tracking gathers its stages under it.
        title: what the run is, in words; or the name its user gave.
        graph: stages and which of them are out of date.
        force: stages, or groups of them, that run even if nothing changed.
        max_parallel: independent stages at once.
        changes: what differs from `params.yaml` as it was.
        keeps: whether it stays so after the run, if the first stage accepts it.
        outcomes: stage -> how it ended, filled as stages end.
        ended: set when no stage will run any more.
    """

    root: Path
    key: str
    title: str
    graph: dag.Dag
    force: tuple[str, ...] = ()
    max_parallel: int = 2
    changes: list[str] = field(default_factory=list)
    keeps: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stopper: Stopper = field(default_factory=Stopper)
    started: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str, name: str = "") -> None:
        """Print one line with the time since the start and the name of its stage."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        with contextlib.suppress(BrokenPipeError):
            print(f"[{minutes:3d}:{seconds:02d}] {name + ' | ' if name else ''}{text}\n", end="", flush=True)

    def work(self, name: str, listen: Say = lambda line: None) -> Outcome:
        """Run stage `name` if it is out of date, pass each line of its output to `listen`, and note its outcome."""
        if name not in self.graph.stale:
            outcome = Outcome(name, "cached")
        elif blocked := [need for need in self.graph.needs[name] if not self.outcomes[need].is_good]:
            outcome = Outcome(name, "skipped", message=f"it needs {blocked[0]}, which did not end well")
        else:
            outcome = self._repro(name, listen)

        seconds = f" in {outcome.seconds:.1f} s" if outcome.seconds else ""
        self.say(f"{outcome.result}{seconds}{': ' if outcome.message else ''}{outcome.message}", name)
        self.outcomes[name] = outcome
        return outcome

    def _repro(self, name: str, listen: Say) -> Outcome:
        """Let DVC run a stage, and once more if what it took from its cache is damaged."""

        def say(line: str) -> None:
            self.say(line, name)
            with contextlib.suppress(Exception):  # A log that fails must not stop the work.
                listen(line)

        outs = [out for need in self.graph.needs[name] for out in self.graph.outs.get(need, ())]
        if missing := [out for out in outs if not (self.root / out).exists()]:
            for out in dag.bring_back(self.root, missing):
                say(f"{out} was removed while this run was at work. It is back, from DVC's cache.")

        forced = ["--force"] if any(dag.is_named(name, one) for one in self.force) else []
        words = ["dvc", "--wait-for-lock", "repro", "--single-item", *forced, name]
        until = time.monotonic() + SECONDS_FOR_DVC
        while True:
            outcome = execute(name, words, self.root, say, self.stopper, BREADCRUMB_RUN=self.key)
            if outcome.result == "failed" and DVC_IS_BUSY in outcome.message and time.monotonic() < until:
                say("A second DVC command is at work in this clone. Its stages refuse to run; trying again.")
                time.sleep(1)
            elif outcome.result == "cached" and (damaged := dag.remove_damaged(self.root, name)):
                names = ", ".join(damaged)
                say(f"DVC's cache is damaged: its copy of {names} is not what dvc.lock names. Running again.")
            else:
                return outcome

    def run(self, submit: Submit | None = None) -> None:
        """Run every stage as soon as its dependencies have ended, `max_parallel` at once; fills `outcomes`.

        The first stage runs alone, because only after it DVC knows which of the others are stale.

        Args:
            submit: starts a stage in another thread, such as a Prefect task that calls `work`. A stage that ended
                there without an outcome runs again here, so a failure of Prefect costs no result.
        """
        with ThreadPoolExecutor(self.max_parallel, "stage") as pool:
            start = submit or (lambda name: pool.submit(self.work, name))
            first = next(iter(self.graph.needs))
            if first in self.graph.stale and first not in self.outcomes:
                self._run_each([first], start)
                if first in self.outcomes and self.outcomes[first].is_good:  # A stop may come before it starts.
                    self.graph = dag.read(self.root, self.force, done=[first])
            if self.keeps and self.is_accepted:
                lent.keep(self.root)
            self._run_each([name for name in self.graph.needs if name not in self.outcomes], start)
        self.ended.set()

    def _run_each(self, waiting: list[str], start: Submit) -> None:
        running: dict[Future[Any], str] = {}
        while running or (waiting and not self.stopper.is_stopped):
            for name in [name for name in waiting if self.outcomes.keys() >= self.graph.needs[name]]:
                if self._has_room(name, running.values()) and not self.stopper.is_stopped:
                    waiting.remove(name)
                    running[start(name)] = name
            for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                if (name := running.pop(future)) not in self.outcomes:
                    self.work(name)
            if self.stopper.is_stopped and self.outcomes.keys() >= set(running.values()):
                return  # Only a record of the stages is still on its way to a server.

    def _has_room(self, name: str, running: Collection[str]) -> bool:
        """Whether a stage may start beside these: together they take at most the processors, or it is alone.

        Two stages that share the processors wait for each other's threads: they ran at a quarter of the speed of one.
        """
        cached = name not in self.graph.stale
        threads = sum(planned.threads_of(self.root, one) for one in (name, *running))
        return len(running) < self.max_parallel and (cached or not running or threads <= planned.PROCESSORS)

    @property
    def problems(self) -> list[Outcome]:
        """Stages that failed, in order, without the stages that were skipped because of them."""
        return [outcome for outcome in self.outcomes.values() if outcome.result == "failed"]

    @property
    def verdict(self) -> str:
        """One sentence: what failed, that the run was stopped, or how many stages ran."""
        if self.problems:
            return "; ".join(f"{problem.name}: {problem.message}" for problem in self.problems)
        executed = sum(outcome.result == "executed" for outcome in self.outcomes.values())
        done = f"{executed} of {len(self.graph.needs)} stages executed"
        if self.stopper.is_stopped:
            return f"stopped, {done}; run again to go on there"
        return f"{done}, {len(self.outcomes) - executed} cached"

    @property
    def status(self) -> str:
        """How the run ended, in MLflow's words; one of which not every stage ended was stopped, however that was."""
        if self.problems:
            return "FAILED"
        is_whole = self.outcomes.keys() >= self.graph.needs.keys() and not self.stopper.is_stopped
        return "FINISHED" if is_whole else "KILLED"

    def close(self) -> int:
        """Say how the run ended, with its result table; returns the exit code, 0 when every stage is up to date."""
        if self.stopper.signal is not None:
            self._say_changes(sys.stderr)
            print(STOPPED, file=sys.stderr, flush=True)
            return 128 + self.stopper.signal
        if self.problems:
            for problem in self.problems:
                print(f"error: {problem.name}: {problem.message}", file=sys.stderr)
            finished = "Finished stages are kept. Mend the cause and run again; the run goes on from there."
            print(finished, file=sys.stderr)
            self._say_changes(sys.stderr)
            return 1

        if text := headline(self.root):
            print(f"\n{text}\n{times(ledger.seconds(self.root))}\nTables:  {TABLE} (this one and all others)")
        print(f"Done: {self.verdict}.")
        if (self.root / REPORT).is_file():
            print(f"Report:  {REPORT} (open it in a browser; it needs no server)")
        elif text:
            print(f"Report:  {REPORT} was made on another machine; --force report makes it here")
        self._say_changes(sys.stdout)
        print("Runs:    make ui    (Prefect and MLflow on this machine; prints their addresses)", flush=True)
        return 0

    @property
    def is_accepted(self) -> bool:
        """Whether the first stage, which checks all settings, has ended well, in this run or before it."""
        first = next(iter(self.graph.needs))
        return first not in self.graph.stale or (first in self.outcomes and self.outcomes[first].is_good)

    def _say_changes(self, stream: IO[str]) -> None:
        if not (self.keeps and self.changes):
            return
        if self.is_accepted:
            print("Changed: params.yaml; git checkout params.yaml returns to the committed settings", file=stream)
        else:
            print("params.yaml is as it was: settings are kept once the plan has accepted them.", file=stream)


@contextlib.contextmanager
def prepared(root: Path, answers: dict[str, Any], keep: bool = False, name: str = "", **how: Any) -> Iterator[Run]:
    """Take the clone's lock, repair the files of a killed run, write the settings, read the graph.

    Args:
        root: root of the clone.
        answers: settings to write into `params.yaml`, by dotted key.
        keep: leave them there once the first stage has accepted them. Otherwise `params.yaml` is put back at the end,
            after a kill by the next run.
        name: the name its user gave to the run.
        how: `force` and `max_parallel` of the run.

    Raises:
        ValueError: another run is at work in the clone, or a setting is wrong; nothing was changed.
    """
    with _alone(root):
        for line in [*lent.restore(root), *dag.repair(root)]:
            print(f"after an earlier kill: {line}", flush=True)
        names_hosts = places.check_cluster(answers, root)
        with edit.applied(answers, root) as changes:
            for change in changes:
                print(f"params.yaml{'' if keep else ', for this run only'}: {change}", flush=True)
            graph = dag.read(root, how.get("force", ()))
            if graph.stale and names_hosts:
                # No stage depends on hosts as it does on files: the first one asks them before others run.
                how["force"] = (*how.get("force", ()), next(iter(graph.needs)))
                graph = dag.read(root, how["force"])
            if name:
                os.environ["BREADCRUMB_NAME"] = name  # Tracking takes it, too.
            params = conf.read_yaml(root / conf.PARAMS)
            key = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
            run = Run(root, key, name or record.title(params), graph, changes=changes, keeps=keep, **how)
            # Where no stage runs there is nothing to track.
            tracked = record.pipeline(root, key, record.title(params, name), lambda: run.status)
            with tracked if graph.stale else contextlib.nullcontext():
                yield run
            _keep_report(run)


def _keep_report(run: Run) -> None:
    """Copy the report of a run that has ended well, with its settings; a failure to do so is a warning."""
    if run.problems or run.stopper.is_stopped:
        return
    try:
        kept = runs.keep(run.root, run.key, run.title, run.changes)
    except OSError as error:
        why = writable.explained(error) or f"{error.strerror}."
        print(f"warning: {runs.FOLDER}/{run.key}: the report is not kept there. {why}", file=sys.stderr)
    else:
        if kept == run.key:
            print(f"Kept:    {runs.FOLDER}/{kept} (this report with its settings; make runs lists all)", flush=True)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Be the only run in this clone; the kernel frees the lock when the process ends."""
    (root / PIPELINE).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(root / PIPELINE).acquire(timeout=0)
    except Timeout:
        raise ValueError(BUSY.format(f"pipeline run (process {pipeline_pid(root)})")) from None
    with lock:
        if (dvc := dag.working_dvc(root)) is not None:
            raise ValueError(BUSY.format(f"DVC command (process {dvc})"))
        (root / HOLDER).write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
