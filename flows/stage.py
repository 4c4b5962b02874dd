"""The only Prefect task: it runs one DVC stage, logs its lines, and ends in a state that shows its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Failed

from flows.child import Outcome, Say


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def dvc_stage(name: str, work: Callable[[Say], Outcome]) -> Any:
    """Call `work`, which runs stage `name`; cached stages end in a state named Cached, skipped ones in Skipped."""
    logger = get_run_logger()
    outcome = work(logger.info)
    match outcome.result:
        case "cached":
            return Completed(name="Cached", message="nothing it depends on has changed")
        case "skipped":
            return Cancelled(name="Skipped", message=outcome.message)
        case "failed":
            return Failed(message=outcome.message)
    return Completed(message=f"executed in {outcome.seconds:.1f} s")
