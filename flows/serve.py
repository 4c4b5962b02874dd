"""`make serve` offers two deployments on a Prefect server, runs on demand and a nightly evaluation, one at a time.

It needs a server: `make ui`, or `PREFECT_API_URL`. It registers deployments and works; it defines nothing of the
pipeline.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.exceptions import ObjectAlreadyExists
from prefect.schedules import Cron

from flows.server import find_server

POOL = "breadcrumb"
NIGHTLY = "0 3 * * *"
EVALUATIONS = ["evaluate"]


def deploy(root: Path, cron: str = NIGHTLY, force: list[str] | None = None) -> list[Any]:
    """Create the work pool and both deployments on the server of `PREFECT_API_URL`; returns their ids.

    Args:
        root: the clone, where runs take place.
        cron: when the nightly evaluation runs.
        force: groups of stages it repeats even if nothing changed, so that a drift would show.
    """
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
        # One run at a time, because the lock of the clone would refuse a second one.
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
    one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
    nightly = {"form": {"force": EVALUATIONS if force is None else force}}
    return [
        _deploy(root, name="on-demand", concurrency_limit=one_at_a_time, description="Run what is out of date."),
        _deploy(
            root,
            name="nightly-evaluation",
            concurrency_limit=one_at_a_time,
            schedules=[Cron(cron)],
            parameters=nightly,
            description="Repeat the evaluation; the table must not move.",
        ),
    ]


def _deploy(root: Path, name: str, **how: Any) -> Any:
    code = Path(__file__).resolve().parents[1]
    source = flow.from_source(source=str(code), entrypoint="flows/flow.py:reproduce")
    variables = {
        "working_dir": str(root.resolve()),
        "env": {"PYTHONPATH": str(code), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    }
    return source.deploy(  # type: ignore[union-attr]
        name=name,
        work_pool_name=POOL,
        job_variables=variables,
        print_next_steps=False,
        ignore_warnings=True,
        build=False,
        push=False,
        **how,
    )


def main() -> int:
    """Register the deployments, then work until Ctrl-C."""
    server = find_server(Path.cwd())
    if server is None:
        print(
            "error: there is no Prefect server to serve. Start one with `make ui` in another terminal.", file=sys.stderr
        )
        return 1
    env = {**os.environ, "PREFECT_API_URL": server, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    # Prefect reads its settings at import, so a new process must read this one.
    if os.environ.get("PREFECT_API_URL") != server:
        return subprocess.run([sys.executable, "-m", "flows.serve"], env=env, check=False).returncode
    deploy(Path.cwd())
    print(f"Serving at {server.removesuffix('/api')}; Ctrl-C stops, schedules stay.", flush=True)
    words = ["worker", "start", "--pool", POOL, "--type", "process"]
    return subprocess.run([sys.executable, "-m", "prefect", *words], env=env, check=False).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
