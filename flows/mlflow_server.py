"""MLflow's own server, closed to web pages of other origins: `python -m flows.mlflow_server server --port ...`.

MLflow answers every page of this machine, whatever its port, with its reader's rights, and lets it write. This program
takes the words of `mlflow` and starts the same server with our guard before it.
"""

from __future__ import annotations

from typing import Any

from tasks.server.origins import Guarded

APP = "flows.mlflow_server:guarded"
LIMITS = "--factory --http h11"
"""h11 bounds the headers that a client may send; httptools, the default, reads them without end."""


def guarded() -> Any:
    """MLflow's pages and interface for this machine alone."""
    from mlflow.server.fastapi_app import app

    return Guarded(app)


def main() -> None:
    """Be `mlflow`, whose server runs our application."""
    from mlflow import cli, server

    build = server._build_uvicorn_command

    def ours(options: str | None, host: str, port: int, workers: int, app: str, *more: Any) -> list[str]:
        return list(build(f"{options or ''} {LIMITS}", host, port, workers, APP, *more))

    server._build_uvicorn_command = ours
    cli.cli()


if __name__ == "__main__":
    main()
