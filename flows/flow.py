"""The pipeline as one Prefect flow, started by `flows/reproduce.py` or, as a deployment, from Prefect's page.

It reads the order from DVC, runs each stage as one task, and knows nothing of rewards or methods. The work goes on if
the Prefect server is absent or dies.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Failed

from flows import STOPPED
from flows.child import Outcome
from flows.pipeline import REPORT, TABLE, Run, prepared, summary
from flows.settings import Form
from flows.stage import dvc_stage

UI_ADDRESS = Path(".scratch/ui/prefect")
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
        stack.enter_context(_stopped_by_signals(run))
        run.run(lambda name: _task(run, name))
        run.has_ended.set()
        if _answers(str(PREFECT_API_URL.value())):
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
            if _answers(str(PREFECT_API_URL.value())):
                context.run(dvc_stage, name, remember, return_state=True)
        except Exception as error:
            if not run.stopper.is_stopped:
                run.say(f"Prefect could not follow ({type(error).__name__}); the work goes on without it", name)
        return outcomes[0] if outcomes else work(lambda line: None)

    return call


@contextlib.contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the stages first and then do what they did before: Prefect's own handler, if any.

    A signal that was ignored stays ignored: Ctrl-C is not meant for what a script runs in its background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: Any) -> None:
        run.stopper.stop()
        run.has_ended.set()  # The process then ends even if Prefect catches the exception raised here.
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)

    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


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


def find_server(root: Path) -> str | None:
    """Address of a Prefect server that answers: `PREFECT_API_URL`, else the one `make ui` started."""
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        with contextlib.suppress(OSError):
            address = (root / UI_ADDRESS).read_text(encoding="utf-8").strip()
    if not address:
        return None
    if _answers(address):
        return address
    if os.environ.get("PREFECT_API_URL"):
        print(f"warning: no Prefect server answers at {address}; going on without it.", file=sys.stderr, flush=True)
    return None


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def run_here(run: Run, form: Form, use_prefect: bool) -> None:
    """Run through Prefect if it works, else directly; both fill `run.outcomes`."""
    server = find_server(run.root) if use_prefect else None
    if not use_prefect or (server is None and not run.graph.stale):
        # Nothing has to run, and a temporary server would take many seconds to start.
        with _stopped_by_signals(run):
            run.run()
        return
    if server is None:
        run.say("starting Prefect, which records this run ...")

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
    if len(run.outcomes) < len(run.graph.needs) and not run.stopper.is_stopped:
        with _stopped_by_signals(run):
            run.run()


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


def close(run: Run) -> int:
    """Say how a run ended; 0 when every stage is up to date."""
    if not run.has_failed and (run.problems or len(run.outcomes) < len(run.graph.needs)):
        # Prefect catches a KeyboardInterrupt, so the missing outcomes show it.
        print(STOPPED, file=sys.stderr, flush=True)
        return 130
    if run.problems:
        for problem in run.problems:
            print(f"error: {problem.name}: {problem.message}", file=sys.stderr, flush=True)
        print("Finished stages are kept. Mend the cause and run again; the run goes on from there.", file=sys.stderr)
        return 1
    print(summary(run), flush=True)
    return 0
