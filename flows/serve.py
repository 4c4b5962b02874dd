"""Serves this clone's deployments on a Prefect server: `python -m flows.serve form` or `nightly`.

`form` is the form of a run, which `make ui` serves; `nightly` is the scheduled evaluation of `make serve`. Runs are
children of this process and one at a time. There is no work pool, whose runs could be given any command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flows.server import find_server
from tasks import conf

SECONDS_BETWEEN_LOOKS = 2.0
FORM, NIGHTLY = "form", "nightly"


def deployment(name: str) -> Any:
    """The deployment of this name with the settings and choices of now."""
    if name == NIGHTLY:
        from flows import nightly

        return nightly.deployment()
    from flows.flow import Form, reproduce

    return reproduce.to_deployment(
        FORM,
        parameters={"form": Form().model_dump(mode="json")},
        description="Fill in the form and start a run. `params.yaml` stays as it is unless *keep* is set.",
    )


def _keep_up(name: str, seen: list[tuple[Path, int]]) -> None:
    """Show new settings and choices in the form as soon as files differ from `seen`; a new process reads them."""
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if (now := _stamp(Path.cwd())) != seen:
            seen = now
            again = [sys.executable, "-m", "flows.serve", name, "register"]
            subprocess.run([sys.executable, "-m", "tasks.lifetime", *again], check=False)


def _stamp(root: Path) -> list[tuple[Path, int]]:
    files = [root / conf.PARAMS, *sorted((root / conf.CONF).glob("*/*.yaml"))]
    return [(path, path.stat().st_mtime_ns) for path in files if path.is_file()]


def main(words: list[str]) -> int:
    """Register a deployment and, unless told to `register` only, run what is asked of it until Ctrl-C."""
    server = find_server(Path.cwd())
    if server is None:
        print("error: no Prefect server answers. Start one with `make ui` in another terminal.", file=sys.stderr)
        return 1
    # Prefect reads its settings at import, so a new program must read this one.
    if os.environ.get("PREFECT_API_URL") != server:
        os.environ["PREFECT_API_URL"] = server
        os.execv(sys.executable, [sys.executable, "-m", "flows.serve", *words])

    seen = _stamp(Path.cwd())
    made = deployment(words[0])
    number = made.apply()
    if words[0] == NIGHTLY:
        from flows.nightly import set_alarm

        set_alarm(number)
    if words[1:] == ["register"]:
        return 0

    from prefect import serve

    page = f"{server.removesuffix('/api')}/deployments/deployment/{number}"
    print(f"Form:    {page}/run" if words[0] == FORM else f"Nightly: {page}", flush=True)
    threading.Thread(target=_keep_up, args=(words[0], seen), daemon=True).start()
    serve(made, limit=1, pause_on_shutdown=False, print_starting_message=False, query_seconds=1.0)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
