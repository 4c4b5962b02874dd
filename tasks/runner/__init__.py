"""Starts, guards and records one stage: `main(stage, body, Settings)` is the last line of every entry point.

The body gets a `Context` and does the stage's work; everything around it (death with the parent, messages,
resume folder, ledger, tracking) is here. Nothing here may change what a stage writes to its outputs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tasks import conf, planned
from tasks.planned import Plan
from tasks.runner import failure, ledger, process, record
from tasks.runner import quiet as quiet
from tasks.runner.context import SCRATCH as SCRATCH
from tasks.runner.context import Context as Context
from tasks.runner.git import Commit, read_commit
from tasks.runner.lock import wait_for_turn

S = TypeVar("S")


def main(stage: str, body: Callable[[Context[S]], None], settings: type[S], *keys: str, clean: bool = False) -> None:
    """The command line of a stage: an option for each key of its matrix in `dvc.yaml`. Runs it and ends the process.

    Raises:
        SystemExit: the stage failed, and a thread of its still works.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for key in keys:
        parser.add_argument(f"--{key}", required=True)
    given = vars(parser.parse_args())
    name = "-".join(given[key] for key in keys)
    try:
        run(f"{stage}@{name}" if name else stage, body, settings, item=given, clean=clean)
    except SystemExit as exit:
        process.end(exit.code if isinstance(exit.code, int) else 1)
        raise
    process.end(0)


def run(
    name: str,
    body: Callable[[Context[Any]], None],
    settings: type | None = None,
    *,
    item: Mapping[str, str] | None = None,
    clean: bool = False,
    root: Path = Path("."),
) -> None:
    """Run one stage and end the process with 1 if it failed.

    Args:
        name: stage and matrix item as artifacts name them, such as `evaluate@base-0`.
        body: the work. A ValueError (so also DataError) or OutageError is the user's to mend: it becomes one
            `error:` line. Any other exception is ours and shows its traceback. All are kept in `.scratch/logs/`.
        settings: dataclass of the settings in the stage's plan; None for a stage that has no plan.
        item: the keys of the stage's matrix with their values, which its plan must have as well.
        clean: delete the stage's resume folder after success.
        root: root of the clone.

    Raises:
        SystemExit: 1 after a failure, 143 after SIGTERM, 130 after an interrupt.
    """
    process.begin()
    started = time.monotonic()
    status, context, made = "FAILED", None, {}

    try:
        wait_for_turn(root, name)
        code = read_commit(root)  # Before the work: a commit made meanwhile is not the code that runs.
        plan = None if settings is None else _plan(root, name, item or {})
        with planned.only_listed(plan, name):
            context = _prepared(root, name, settings, plan, code)
            body(context)
        made = ledger.hashes(root, name)
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise SystemExit(130) from None
    except Exception as error:
        failure.report(root, name, error)
        raise SystemExit(1) from None
    finally:
        # From here on a second signal must not cut the record short; the work itself has ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        seconds, peak_rss_mb = time.monotonic() - started, process.peak_rss_mb()
        if context is not None:
            context.track.end(status, seconds)
        if status == "FINISHED" and context is not None:
            ledger.write(root, name, {**context.measured, **made}, code, seconds, peak_rss_mb, context.track.record)
            if clean:
                for folder in context._scratch:
                    shutil.rmtree(folder, ignore_errors=True)


def _plan(root: Path, name: str, item: Mapping[str, str]) -> Plan:
    """The plan of the stage.

    Raises:
        ValueError: it is not that of this code or of this item.
    """
    plan = planned.read(root, name)
    planned.check_sources(plan, root, name)
    planned.check_item(plan, name, item)
    return plan


def _prepared(root: Path, name: str, settings: type | None, plan: Plan | None, code: Commit) -> Context[Any]:
    """What the body gets; the record of the stage is open from here on.

    Raises:
        ValueError: the plan holds other settings than those of this stage.
    """
    used: Any = None
    if settings is not None and plan is not None:
        used = planned.settings_of(plan, settings, name)
    params = conf.read_yaml(root / conf.PARAMS)  # For records only; what a stage does stands in its plan.
    return Context(name, root, used, str(params.get("data")), record.start(name, params, root, code))
