"""One run of the pipeline in one clone: its lock, its settings, the order of its stages, and how it is stopped.

Prefect is not needed here, and no stage is known by name: `flows.flow` runs the same `Run` with a task for each stage.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flows import dag, restored, settings
from flows.child import Outcome, Say, Stopper, repro
from tasks import conf
from tasks.runner import record

LOCK = Path(".scratch/pipeline.lock")
HOLDER = Path(".scratch/pipeline.pid")

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
        changes: what was changed in `params.yaml` for good.
        outcomes: stage -> how it ended, filled as stages end.
        ended: set when no stage will run any more.
        code: exit code, once the end was told to the user.
    """

    root: Path
    key: str
    title: str
    graph: dag.Dag
    force: tuple[str, ...]
    max_parallel: int
    changes: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stopper: Stopper = field(default_factory=Stopper)
    started: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    code: int | None = None
    _print_lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, text: str, name: str = "") -> None:
        """Print one line with the time since the start and the name of its stage."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        with self._print_lock, contextlib.suppress(BrokenPipeError):
            print(f"[{minutes:3d}:{seconds:02d}] {name + ' | ' if name else ''}{text}", flush=True)

    def work(self, name: str, listen: Say = lambda line: None) -> Outcome:
        """Run stage `name` if it is out of date, pass each line of its output to `listen`, and note its outcome."""
        blocked = [need for need in self.graph.needs[name] if not self.outcomes[need].is_good]
        if name not in self.graph.stale:
            outcome = Outcome(name, "cached")
        elif blocked:
            outcome = Outcome(name, "skipped", message=f"it needs {blocked[0]}, which did not end well")
        else:
            outcome = self._execute(name, listen)
            dag.keep_lock_file(self.root)
        if outcome.message or outcome.result != "skipped":
            seconds = f" in {outcome.seconds:.1f} s" if outcome.seconds else ""
            self.say(f"{outcome.result}{seconds}{': ' if outcome.message else ''}{outcome.message}", name)
        self.outcomes[name] = outcome
        return outcome

    def _execute(self, name: str, listen: Say) -> Outcome:
        def on_line(line: str) -> None:
            self.say(line, name)
            with contextlib.suppress(Exception):  # A log that fails must not stop the work.
                listen(line)

        is_forced = any(forced in (name, name.partition("@")[0]) for forced in self.force)
        outcome = repro(name, self.root, self.key, is_forced, on_line, self.stopper)
        if outcome.result == "cached" and (damaged := restored.remove_damaged(self.root, name)):
            names = ", ".join(damaged)
            on_line(f"DVC's cache is damaged: its copy of {names} is not what dvc.lock names. Running again.")
            outcome = repro(name, self.root, self.key, is_forced, on_line, self.stopper)
        return outcome

    def run(self, submit: Submit | None = None) -> None:
        """Run every stage as soon as its dependencies have ended, `max_parallel` at once; fills `outcomes`.

        The stage that all others wait for runs first, because only after it DVC knows which of the others are stale.

        Args:
            submit: starts a stage in another thread, such as a Prefect task that calls `work`. A stage that ended
                there without an outcome runs again here, so a failure of Prefect costs no result.
        """
        with ThreadPoolExecutor(self.max_parallel, "stage") as pool:
            start = submit or (lambda name: pool.submit(self.work, name))
            first = self.graph.first
            if first is not None and first in self.graph.stale and first not in self.outcomes:
                self._run_each([first], start)
                if first in self.outcomes and self.outcomes[first].is_good:  # A stop may come before it starts.
                    self.graph = dag.read(self.root, self.force, done=[first])
            self._run_each([name for name in self.graph.urgent_first if name not in self.outcomes], start)

    def _run_each(self, waiting: list[str], start: Submit) -> None:
        running: dict[Future[Any], str] = {}
        while running or (waiting and not self.stopper.is_stopped):
            for name in [n for n in waiting if all(need in self.outcomes for need in self.graph.needs[n])]:
                if len(running) < self.max_parallel and not self.stopper.is_stopped:
                    waiting.remove(name)
                    running[start(name)] = name
            for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                if (name := running.pop(future)) not in self.outcomes:
                    self.work(name)
            if self.stopper.is_stopped and self.outcomes.keys() >= set(running.values()):
                return  # Only a record of the stages is still on its way to a server.

    @property
    def is_complete(self) -> bool:
        """Whether every stage has ended well or badly; a stopped run leaves stages out."""
        return len(self.outcomes) == len(self.graph.needs) and not self.stopper.is_stopped

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
        if not self.is_complete:
            return f"stopped, {done}; run again to go on there"
        return f"{done}, {len(self.outcomes) - executed} cached"


@contextlib.contextmanager
def stopped_by_signals(stopper: Stopper) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C stop the children of a run; the run then ends by itself, in good order.

    A signal that was ignored stays ignored: Ctrl-C is not meant for what a script runs in its background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, lambda received, frame: stopper.stop(received))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


@contextlib.contextmanager
def prepared(
    root: Path,
    answers: dict[str, Any],
    force: tuple[str, ...] = (),
    max_parallel: int = 2,
    once: bool = False,
    name: str = "",
) -> Iterator[Run]:
    """Take the clone's lock, repair the files of a killed run, write the settings, read the graph.

    Args:
        root: root of the clone.
        answers: settings to write into `params.yaml`, by dotted key.
        force: stages to run even if nothing changed.
        max_parallel: independent stages at once.
        once: put `params.yaml` back at the end; after a kill the next run does it.
        name: the name its user gave to the run.

    Raises:
        ValueError: another run is at work in the clone, or a setting is wrong; nothing was changed.
    """
    with alone(root):
        for line in [*settings.restore(root), *dag.repair(root)]:
            print(f"after an earlier kill: {line}", flush=True)
        key = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        with settings.applied(answers, root, once) as changes:
            for change in changes:
                print(f"params.yaml: {change}", flush=True)
            graph = dag.read(root, force)
            title = name or record.title(conf.read_yaml(root / conf.PARAMS))
            if name:
                os.environ["BREADCRUMB_NAME"] = name  # Tracking takes it, too.
            yield Run(root, key, title, graph, force, max_parallel, [] if once else changes)


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Be the only pipeline run in this clone; the kernel frees the lock when the process ends."""
    holder = root / HOLDER
    holder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / LOCK, timeout=0):
            if pid := dag.working_dvc(root):
                raise ValueError(_busy(f"DVC command (process {pid})"))
            holder.write_text(f"{os.getpid()}\n", encoding="utf-8")
            yield
    except Timeout:
        process = holder.read_text(encoding="utf-8").strip() if holder.exists() else "unknown"
        raise ValueError(_busy(f"pipeline run (process {process})")) from None


def _busy(who: str) -> str:
    return (
        f"another {who} is at work in this clone, and two would overwrite each other's results. "
        "Wait for it to end, stop it, or work in a second clone."
    )
