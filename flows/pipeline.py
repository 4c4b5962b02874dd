"""One run of the pipeline in one clone: its lock, the order of stages, and the summary at the end.

Prefect is not needed here: `flows.flow` wraps each stage in a task, and this module goes on without it
when it falls away. It knows no stage by name.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows import dag, restored, settings
from flows.child import Outcome, Say, Stopper, execute, start_tracking
from tasks import conf

LOCK = Path(".scratch/pipeline.lock")
TABLE = Path("reports/results.md")
REPORT = Path("reports/index.html")

Start = Callable[[str], Callable[[], Outcome]]


@dataclass
class Run:
    """A prepared pipeline run: its settings are written, its lock is held, its graph is read.

    `has_ended` is set when the last stage has ended or all were stopped, `is_free` when Prefect has returned from the
    run; `put_back` restores settings that were changed for this run only.
    """

    root: Path
    key: str
    graph: dag.Dag
    force: tuple[str, ...]
    max_parallel: int
    changes: list[str]
    put_back: Callable[[], None] = lambda: None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stopper: Stopper = field(default_factory=Stopper)
    started: float = field(default_factory=time.monotonic)
    has_ended: threading.Event = field(default_factory=threading.Event)
    is_free: threading.Event = field(default_factory=threading.Event)
    _print_lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, text: str, name: str = "") -> None:
        """Print one line with the time since the start and the name of its stage."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        with self._print_lock, contextlib.suppress(BrokenPipeError):
            print(f"[{minutes:3d}:{seconds:02d}] {name + ' | ' if name else ''}{text}", flush=True)

    def work(self, name: str) -> Callable[[Say], Outcome]:
        """The work of stage `name`, as a function that also passes each line of output to its argument."""

        def work(listen: Say) -> Outcome:
            if name not in self.graph.stale:
                self.say("cached", name)
                return Outcome(name, "cached")
            blocked = [need for need in self.graph.needs[name] if not self.outcomes[need].is_good]
            if blocked:
                return Outcome(name, "skipped", message=f"it needs {blocked[0]}, which did not end well")

            def on_line(line: str) -> None:
                self.say(line, name)
                with contextlib.suppress(Exception):  # A log that fails must not stop the work.
                    listen(line)

            is_forced = any(forced in (name, name.partition("@")[0]) for forced in self.force)
            outcome = execute(name, self.root, self.key, is_forced, on_line, self.stopper)
            if outcome.result == "cached" and (damaged := restored.remove_damaged(self.root, name)):
                names = ", ".join(damaged)
                on_line(f"DVC's cache is damaged: its copy of {names} is not what dvc.lock names. Running again.")
                outcome = execute(name, self.root, self.key, is_forced, on_line, self.stopper)
            dag.keep_lock_file(self.root)
            tail = f": {outcome.message}" if outcome.message else ""
            self.say(f"{outcome.result} in {outcome.seconds:.1f} s{tail}", name)
            return outcome

        return work

    def run(self, start: Start | None = None) -> None:
        """Run every stage as soon as its dependencies have ended, `max_parallel` at once; fills `outcomes`.

        The stage that all others wait for runs first, because only after it DVC knows which of the others are stale.

        Args:
            start: called in this thread with a stage's name; returns the function that runs the stage in another
                thread. None runs the stage directly.
        """
        begin = start or (lambda name: lambda: self.work(name)(lambda line: None))
        first = self.graph.first
        if first is not None and first in self.graph.stale and first not in self.outcomes:
            self._run_each([first], begin)
            if self.outcomes[first].is_good:
                self.graph = dag.read(self.root, self.force, done=[first])
        self._run_each([name for name in self.graph.urgent_first if name not in self.outcomes], begin)

    def _run_each(self, waiting: list[str], begin: Start) -> None:
        """Run these stages, each as soon as its dependencies have ended."""
        running: dict[Future[Outcome], str] = {}
        with ThreadPoolExecutor(self.max_parallel, "stage") as pool:
            try:
                while waiting or running:
                    for name in [n for n in waiting if all(need in self.outcomes for need in self.graph.needs[n])]:
                        if len(running) < self.max_parallel:
                            waiting.remove(name)
                            running[pool.submit(begin(name))] = name
                    for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                        self.outcomes[running.pop(future)] = future.result()
            except BaseException:
                self.stopper.stop()
                self.has_ended.set()
                raise

    @property
    def problems(self) -> list[Outcome]:
        """Stages that failed, in order, without the stages that were skipped because of them."""
        bad = [outcome for outcome in self.outcomes.values() if not outcome.is_good]
        return [outcome for outcome in bad if outcome.result == "failed"] or bad

    @property
    def has_failed(self) -> bool:
        """Whether a stage failed; stages that were skipped without that were stopped."""
        return any(outcome.result == "failed" for outcome in self.outcomes.values())

    @property
    def verdict(self) -> str:
        """One sentence: what failed, or how many stages ran."""
        if self.problems:
            return "; ".join(f"{problem.name}: {problem.message}" for problem in self.problems)
        executed = sum(outcome.result == "executed" for outcome in self.outcomes.values())
        return f"{executed} of {len(self.graph.needs)} stages executed, {len(self.outcomes) - executed} cached"


@contextlib.contextmanager
def prepared(
    root: Path, answers: dict[str, Any], force: tuple[str, ...], max_parallel: int, once: bool = False
) -> Iterator[Run]:
    """Take the clone's lock, repair the files of a killed run, write the settings, read the graph.

    Args:
        root: root of the clone.
        answers: settings to write into `params.yaml`, by dotted key.
        force: stages to run even if nothing changed.
        max_parallel: independent stages at once.
        once: restore `params.yaml` at the end.

    Raises:
        ValueError: another run is at work in the clone, or a setting is wrong; nothing was changed.
    """
    with _alone(root):
        for line in dag.repair(root):
            print(f"after an earlier kill: {line}", flush=True)
        path = root / conf.PARAMS
        before = path.read_text(encoding="utf-8") if once and path.is_file() else None
        changes = settings.apply(answers, root)
        for change in changes:
            print(f"params.yaml: {change}", flush=True)
        key = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"

        def put_back() -> None:
            if before is not None and changes:
                settings.write(root, before)

        try:
            graph = dag.read(root, force)
            if graph.stale:
                start_tracking(root, key)
            yield Run(root, key, graph, force, max_parallel, changes if before is None else [], put_back)
        finally:
            put_back()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Be the only pipeline run in this clone; the kernel frees the lock when the process ends."""
    path = root / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(_busy(f"pipeline run (process {holder})")) from None
        if pid := dag.working_dvc(root):
            raise ValueError(_busy(f"DVC command (process {pid})"))
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _busy(who: str) -> str:
    return (
        f"another {who} is at work in this clone, and two would overwrite each other's results. "
        "Wait for it to end, stop it, or work in a second clone."
    )


def summary(run: Run) -> str:
    """The result table, and where to find more."""
    lines = []
    table = run.root / TABLE
    if table.is_file():
        lines += ["", *headline(table.read_text(encoding="utf-8"), shutil.get_terminal_size((100, 24)).columns)]
        lines.append(f"Tables:  {TABLE} (this one and all others)")
    lines.append(f"Done: {run.verdict}.")
    if (run.root / REPORT).is_file():
        lines.append(f"Report:  {REPORT} (open it in a browser; it needs no server)")
    elif table.is_file():
        lines.append(f"Report:  {REPORT} was made on another machine; --force report makes it here")
    if run.changes:
        lines.append("Changed: params.yaml; git checkout params.yaml returns to the committed settings")
    lines.append("Runs:    make ui    (Prefect and MLflow on this machine; prints their addresses)")
    return "\n".join(lines)


def headline(text: str, width: int) -> list[str]:
    """What stands in `results.md` before its first section, as lines of a terminal.

    Prose is wrapped, columns are aligned, and those that do not fit any more are left out.
    """
    lines = []
    for block in text.partition("\n## ")[0].removeprefix("# ").strip().split("\n\n"):
        lines += [*(_aligned(block, width) if block.startswith("|") else textwrap.wrap(block, width)), ""]
    return lines


def _aligned(table: str, width: int) -> list[str]:
    """A Markdown table without its bars: the first column to the left, the others to the right."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    cells = [[cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in row] for row in (rows[0], *rows[2:])]
    kept: list[list[str]] = []
    for column in zip(*cells, strict=True):
        size = max(map(len, column))
        if not kept or sum(len(one[0]) + 2 for one in kept) + size <= width:
            kept.append([one.rjust(size) if kept else one.ljust(size) for one in column])
    return ["  ".join(line).rstrip() for line in zip(*kept, strict=True)]
