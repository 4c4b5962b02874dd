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

from tasks import conf, identity, planned
from tasks.runner import ledger, process, record
from tasks.runner.context import Context as Context
from tasks.runner.git import read_commit
from tasks.runner.lock import refuse_beside_pipeline, wait_for_turn

S = TypeVar("S")


def main(stage: str, body: Callable[[Context[S]], None], settings: type[S], *keys: str, clean: bool = False) -> None:
    """The command line of a stage: an option for each key of its matrix in `dvc.yaml`. Runs it and ends the process.

    Raises:
        SystemExit: the stage failed, and a thread of its still works.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for key in keys:
        parser.add_argument(f"--{key}", required=True)
    item = vars(parser.parse_args())
    name = "@".join(filter(None, [stage, "-".join(item.values())]))
    try:
        run(name, body, settings, item=item, clean=clean)
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
    started, status, track = time.monotonic(), "FAILED", None
    try:
        refuse_beside_pipeline(root)
        with wait_for_turn(root, name):
            code = read_commit(root)  # Before the work: a commit made meanwhile is not the code that runs.
            plan = None if settings is None else planned.read(root, name)
            if plan is not None:
                planned.check_sources(plan, root, name)
                planned.check_item(plan, name, item or {})

            with planned.only_listed(plan, name):
                used: Any = planned.settings_of(plan, settings, name) if plan and settings else None
                params = conf.read_yaml(root / conf.PARAMS)  # For records only; what a stage does stands in its plan.
                track = record.start(name, params, root, code)
                own_parts = identity.outside(plan.files) if plan is not None else {}
                if own_parts:  # No commit has them.
                    track.set_tags({"own_parts": ", ".join(map(" ".join, own_parts.items()))})
                context = Context(name, root, used, str(params.get("data")), track)
                body(context)

            measured = context.measured | ({"own_parts": own_parts} if own_parts else {})
            ledger.write(root, name, measured, code, time.monotonic() - started, track.record)
            if clean and "scratch" in vars(context):
                shutil.rmtree(context.scratch, ignore_errors=True)
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit) as error:
        status = "KILLED"
        raise SystemExit(getattr(error, "code", 130)) from None
    except Exception as error:
        process.report(root, name, error)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second signal must not cut the record short.
        if track is not None:
            track.end(status, time.monotonic() - started)
