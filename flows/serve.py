"""Serves one of this clone's deployments on a Prefect server: `python -m flows.serve form` or `nightly`.

`form` is the form of a run, which `make ui` serves; `nightly` is the scheduled evaluation of `make serve`. Runs are
children of this process and one at a time. There is no work pool, whose runs could be given any command, and what
the server's record of a deployment says of its code is ignored: whoever reaches the server can change that record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flows import command
from flows.server import find_server
from tasks import conf

SECONDS_BETWEEN_LOOKS = 2.0


def register(name: str) -> tuple[Any, object]:
    """Put a deployment on the server with the settings and choices of now; also its id."""
    if name == "nightly":
        from flows import nightly

        made = nightly.deployment()
        nightly.set_alarm(number := made.apply())
        return made, number
    from flows.flow import Form, reproduce

    about = "Fill in the form and start a run. `params.yaml` stays as it is unless *keep* is set."
    made = reproduce.to_deployment(name, parameters={"form": Form().model_dump(mode="json")}, description=about)
    return made, made.apply()


def _run_ours_only(entrypoint: str) -> None:
    """Let this process and its children run this flow, whatever code or steps the server's record names.

    Prefect asks the record in two places: in the process of a run, and in this one for the hooks of a run that ended.
    """
    from prefect.flows import load_flow_from_entrypoint
    from prefect.runner import runner

    async def ours(*given: Any, **options: Any) -> Any:
        return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)

    os.environ["PREFECT__FLOW_ENTRYPOINT"] = entrypoint
    runner.load_flow_from_flow_run = ours


def _keep_up(name: str, seen: dict[Path, int]) -> None:
    """Register again as soon as files differ from `seen`; a new process reads them."""
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if (now := _stamps()) != seen:
            seen = now
            again = [sys.executable, "-m", "flows.serve", name, "register"]
            subprocess.run([sys.executable, "-m", "tasks.lifetime", *again], check=False)


def _stamps() -> dict[Path, int]:
    files = [conf.PARAMS, *conf.CONF.glob("*/*.yaml")]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def main(name: str, *words: str) -> int:
    """Register a deployment and, unless told to `register` only, run what is asked of it until Ctrl-C."""
    server = find_server(Path.cwd())
    if server is None:
        raise ValueError("no Prefect server answers. Start one with `make ui` in another terminal.")
    # Prefect reads its settings at import, so a new program must read this one.
    if os.environ.get("PREFECT_API_URL") != server:
        os.environ["PREFECT_API_URL"] = server
        os.execv(sys.executable, [sys.executable, "-m", "flows.serve", name, *words])

    seen = _stamps()
    made, number = register(name)
    _run_ours_only(made.entrypoint)
    if words == ("register",):
        return 0
    from prefect import serve

    page = f"{server.removesuffix('/api')}/deployments/deployment/{number}"
    when = "".join(f" (cron: {one.schedule.cron}, {one.schedule.timezone})" for one in made.schedules or ())
    print(f"Form:    {page}/run" if name == "form" else f"Nightly: {page}{when}", flush=True)
    threading.Thread(target=_keep_up, args=(name, seen), daemon=True).start()
    serve(made, limit=1, pause_on_shutdown=False, print_starting_message=False, query_seconds=1.0)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(lambda: main(*sys.argv[1:])))
