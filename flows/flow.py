"""The pipeline as one Prefect flow, started by `flows/reproduce.py` or, as a deployment, from Prefect's page.

It reads the order from DVC, runs each stage as one task, and knows nothing of rewards or methods. The work goes on if
the Prefect server is absent or dies.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Failed

from flows.child import Outcome
from flows.ending import close, stopped_by_signals
from flows.pipeline import REPORT, TABLE, Run, prepared
from flows.server import answers
from flows.settings import Form
from flows.stage import dvc_stage

SECONDS_TO_END = 5.0

_ready: contextvars.ContextVar[Run | None] = contextvars.ContextVar("ready", default=None)


@flow(name="reproduce", flow_run_name="reproduce", persist_result=False, validate_parameters=True)
def reproduce(form: Form = Form()) -> Any:  # noqa: B008 - Prefect shows the default in its form.
    """From a question to a result table: run every stage that is out of date, in the order DVC gives."""
    with contextlib.ExitStack() as stack:
        run = _ready.get()
        if run is None:
            run = stack.enter_context(
                prepared(Path.cwd(), form.answers(), tuple(form.force), form.max_parallel),
            )
        stack.enter_context(stopped_by_signals(run))
        run.run(lambda name: _task(run, name))
        run.has_ended.set()
        if answers(str(PREFECT_API_URL.value())):
            _show(run)
        return Failed(message=run.verdict) if run.problems else Completed(message=run.verdict)


def _task(run: Run, name: str) -> Callable[[], Outcome]:
    """A function for another thread, which runs the stage as a task, or directly if Prefect cannot run the task."""
    context = contextvars.copy_context()
    work = run.work(name)
    outcomes: list[Outcome] = []

    def remember(listen: Callable[[str], None]) -> Outcome:
        outcomes.append(work(listen))
        return outcomes[-1]

    def call() -> Outcome:
        try:
            if answers(str(PREFECT_API_URL.value())):
                context.run(dvc_stage, name, remember, return_state=True)
        except Exception as error:
            if not run.stopper.is_stopped:
                run.say(f"Prefect could not follow ({type(error).__name__}); the work goes on without it", name)
        return outcomes[0] if outcomes else work(lambda line: None)

    return call


def _show(run: Run) -> None:
    """Put the result table and the path of the report on the run's page in Prefect."""
    with contextlib.suppress(Exception):  # The page is only a view; the results are files.
        table = run.root / TABLE
        text = table.read_text(encoding="utf-8") if table.is_file() else "No result table was written."
        lines = [f"- {name}: {outcome.result}, {outcome.seconds:.1f} s" for name, outcome in run.outcomes.items()]
        links = f"Report: `{REPORT}` in the clone. MLflow: {os.environ.get('MLFLOW_TRACKING_URI', '`make ui`')}."
        changed = "".join(f"\n- set {change}" for change in run.changes)
        create_markdown_artifact(
            f"{text}\n\n{links}\n\n{run.verdict}\n{changed}\n\n" + "\n".join(lines), key="result-table"
        )


def follow(run: Run, form: Form, server: str | None) -> None:
    """Run through Prefect, on a temporary server where none is given; where it falls away stages are left to run."""
    address = {PREFECT_API_URL: server} if server else {}
    token = _ready.set(run)
    threading.Thread(target=_end_without_prefect, args=(run,), daemon=True).start()
    try:
        with temporary_settings(updates=address, restore_defaults=None if server else {PREFECT_API_URL}):
            reproduce(form, return_state=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"warning: Prefect fell away ({reason}); going on without it.", file=sys.stderr, flush=True)
    finally:
        _ready.reset(token)
        run.is_free.set()


def _end_without_prefect(run: Run) -> None:
    """End the process if the stages have ended and Prefect hangs on a dead server."""
    run.has_ended.wait()
    if run.is_free.wait(SECONDS_TO_END):
        return
    print("warning: Prefect does not answer any more; its page may show this run as running.", file=sys.stderr)
    code = close(run)
    run.put_back()
    sys.stdout.flush()
    os._exit(code)
