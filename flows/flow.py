"""The pipeline as one Prefect flow: every stage is a task with its log, and the run ends with its result table.

`flows/reproduce.py` starts it, or, as a deployment, Prefect's page. A server that dies or hangs does not stop the
work: tasks are run by this process, and only the record of them is the server's.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect import flow, get_client, runtime, tags, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.child import Outcome, Say, stopped_by_signals
from flows.pipeline import REPORT, Run, prepared
from tasks.lifetime import end_with_parent
from tasks.params.form import form_of
from tasks.report.terminal import TABLE
from tasks.runner import record

SECONDS_TO_BEGIN, SECONDS_TO_END = 10.0, 4.0
GIVEN_UP = "the run went on without Prefect, which did not answer in time"
GIVEN_BY_PREFECT = re.compile(r"[a-z0-9]+(-[a-z0-9]+){1,2}")
Form: Any = form_of()

_begun: contextvars.ContextVar[threading.Lock | None] = contextvars.ContextVar("begun", default=None)
_ready: contextvars.ContextVar[Run | None] = contextvars.ContextVar("ready", default=None)


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def dvc_stage(name: str, work: Callable[[str, Say], Outcome]) -> State[Any]:
    """Run stage `name`; what did not run ends as Cached, Skipped (something it needs failed) or Stopped."""
    outcome = work(name, get_run_logger().info)
    match outcome.result:
        case "cached":
            return Completed(name="Cached", message="nothing it depends on has changed")
        case "skipped" | "stopped":
            return Cancelled(name=outcome.result.capitalize(), message=outcome.message)
        case "failed":
            return Failed(message=outcome.message)
    return Completed(message=f"executed in {outcome.seconds:.1f} s")


@flow(name="reproduce", persist_result=False)
def reproduce(form: Form = Form()) -> State[Any]:  # noqa: B008 - Prefect shows the default in its form.
    """From a question to a result table: run every stage that is out of date, in the order DVC gives."""
    try:
        with _prepared(form) as run, stopped_by_signals(run.stopper):
            _begin(run)
            if not _may_go_on():
                return Cancelled(message=GIVEN_UP)
            run.run(lambda name: dvc_stage.submit(name, run.work).wrapped_future)
            if not run.stopper.is_stopped:
                _show(run)
    except ValueError as error:  # The user's to mend: one line, without a traceback.
        return Failed(message=str(error))
    if run.stopper.is_stopped:
        return Cancelled(message=run.verdict)
    return Failed(message=run.verdict) if run.problems else Completed(message=run.verdict)


@contextlib.contextmanager
def _prepared(form: Any) -> Iterator[Run]:
    """The run of the command line that calls the flow, or one that the form describes."""
    if (run := _ready.get()) is not None:
        yield run
        return
    end_with_parent()  # The process that serves the form: nobody would cancel a run that outlives it.
    name = runtime.flow_run.name or ""
    name = "" if GIVEN_BY_PREFECT.fullmatch(name) else name
    how = {"force": tuple(form.force), "max_parallel": form.max_parallel}
    with prepared(Path.cwd(), form.answers(), form.keep, name, **how) as run:
        yield run


def _may_go_on() -> bool:
    """Whether the command line still waits for this flow; it does not afterwards."""
    begun = _begun.get()
    return begun is None or begun.acquire(blocking=False)


def _tag(root: Path) -> str:
    return f"clone:{root.resolve()}"


def _begin(run: Run) -> None:
    """Give the run its name, and close what a killed run of this clone has left open: its lock is free."""
    here, killed = str(runtime.flow_run.id), Crashed(message="its process was killed")
    ours = {"all_": [_tag(run.root)]}
    of_ours = FlowRunFilter(tags=ours)
    open_runs = FlowRunFilter(tags=ours, state={"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}})
    open_stages = TaskRunFilter(state={"type": {"any_": ["RUNNING", "PENDING"]}, "name": None})
    with contextlib.suppress(Exception), get_client(sync_client=True) as client:  # A server that falls away.
        client.update_flow_run(here, name=run.title, tags=ours["all_"])
        for stage in client.read_task_runs(flow_run_filter=of_ours, task_run_filter=open_stages):
            if str(stage.flow_run_id) != here:
                client.set_task_run_state(stage.id, killed, force=True)
        for left in client.read_flow_runs(flow_run_filter=open_runs):
            if str(left.id) != here:
                client.set_flow_run_state(left.id, killed, force=True)


def _show(run: Run) -> None:
    """Put the result table and the path of the report on the run's page in Prefect."""
    with contextlib.suppress(Exception):  # The page is only a view; the results are files.
        table = run.root / TABLE
        text = table.read_text(encoding="utf-8") if table.is_file() else "No result table was written."
        server = record.shown(os.environ.get("MLFLOW_TRACKING_URI", "`make ui`"))
        lines = [f"- set {change}" for change in run.changes]
        lines += [f"- {name}: {outcome.result}, {outcome.seconds:.1f} s" for name, outcome in run.outcomes.items()]
        about = f"Report: `{REPORT}` in the clone. MLflow: {server}.\n\n{run.verdict}\n\n" + "\n".join(lines)
        create_markdown_artifact(f"{text}\n\n{about}", key="result-table")


def follow(run: Run, server: str) -> bool:
    """Run all stages as tasks on this server, or as many as Prefect lets run; whether Prefect then ended, too.

    The flow has a thread of its own, for at its end Prefect waits minutes for a server that has died. At its beginning
    it waits as long for one that hangs: whoever takes `begun` first, the flow or this function, does the work.
    """
    begun = threading.Lock()

    def in_thread() -> None:
        _ready.set(run)
        _begun.set(begun)
        try:
            with temporary_settings({PREFECT_API_URL: server}), tags(_tag(run.root)):
                reproduce(return_state=True)
        except Exception as error:
            if not begun.acquire(blocking=False) and not run.outcomes:
                return  # It was given up, and that was said.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"warning: Prefect fell away ({reason}); going on without it.", file=sys.stderr, flush=True)

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    until = time.monotonic() + SECONDS_TO_BEGIN
    while thread.is_alive() and not run.ended.wait(0.1):
        if time.monotonic() > until and begun.acquire(blocking=False):
            print(
                f"warning: Prefect did not begin the run within {SECONDS_TO_BEGIN:.0f} s; going on without it.",
                file=sys.stderr,
                flush=True,
            )
            return False
        if run.stopper.is_stopped and not run.stopper.is_busy:
            break  # Stopped before its first stage, while a server hangs.
    thread.join(SECONDS_TO_END)
    if thread.is_alive() and not run.stopper.is_stopped:
        print("warning: Prefect does not answer; the next run closes this one on its page.", file=sys.stderr)
    return not thread.is_alive()
