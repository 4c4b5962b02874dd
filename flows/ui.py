"""`make ui` starts Prefect, MLflow and the form of a run on the loopback address, with what this clone has stored.

All end with this command. While it runs, pipeline runs of this clone report to this Prefect server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from flows import command
from flows.server import UI_ADDRESS, child, started, wait_for

MLFLOW, LOGS = Path(".scratch/mlflow"), Path(".scratch/logs")
RUNS = "#/experiments/1/runs?viewStateShareKey=results&workflowType=machine_learning"
"""The runs with their results, on MLflow's page; it opens on traces otherwise."""


def main() -> NoReturn:
    """Start everything, print the addresses and wait for Ctrl-C; start nothing if a port is taken."""
    ports = {"Prefect": os.environ.get("PORT_PREFECT", "4200"), "MLflow": os.environ.get("PORT_MLFLOW", "5000")}
    check_ports(ports)
    _serve(int(ports["Prefect"]), int(ports["MLflow"]))


def _serve(prefect_port: int, mlflow_port: int) -> NoReturn:
    print("Prefect and MLflow are starting ...", flush=True)
    with contextlib.ExitStack() as stack:
        log, page = LOGS / "mlflow.txt", f"http://127.0.0.1:{mlflow_port}"
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        mlflow = stack.enter_context(child(_mlflow_words(mlflow_port), log, env=env))

        address, prefect = stack.enter_context(started(Path.cwd(), prefect_port))
        UI_ADDRESS.parent.mkdir(parents=True, exist_ok=True)
        UI_ADDRESS.write_text(address, encoding="utf-8")
        stack.callback(UI_ADDRESS.unlink, missing_ok=True)
        print(f"Prefect: {address.removesuffix('/api')}", flush=True)

        wait_for(mlflow, "MLflow", f"{page}/health", log)
        print(f"MLflow:  {page}/{RUNS}", flush=True)
        stack.enter_context(child(["tasks.runner.upload"], LOGS / "tracking.txt"))  # What no server has taken yet.
        env = {**os.environ, "PREFECT_API_URL": address}
        form = stack.enter_context(child(["flows.serve", "form"], LOGS / "form.txt", env=env, stdout=None))

        servers = {"Prefect": prefect, "MLflow": mlflow, "the form": form}
        while not (over := [name for name, server in servers.items() if server.poll() is not None]):
            time.sleep(0.3)
        raise ValueError(f"{over[0]} ended by itself (exit status {servers[over[0]].returncode}); see {LOGS}")


def _mlflow_words(port: int) -> list[str]:
    MLFLOW.mkdir(parents=True, exist_ok=True)
    database, artifacts = f"sqlite:///{(MLFLOW / 'mlflow.db').resolve()}", (MLFLOW / "artifacts").resolve().as_uri()
    where = ["--backend-store-uri", database, "--artifacts-destination", artifacts]
    hosts = f"localhost:{port},127.0.0.1:{port}"  # By default it answers to names such as 192.168.any.example, too.
    return [
        "flows.mlflow_server",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--allowed-hosts",
        hosts,
        *where,
    ]


def check_ports(ports: Mapping[str, str]) -> None:
    """Refuse ports that are no numbers, the same one twice, or taken: the program on it would answer in our place.

    Raises:
        ValueError: names the port and the variable that changes it.
    """
    for name, port in ports.items():
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"PORT_{name.upper()}={port!r}, expected a number from 1 to 65535.")
    with contextlib.ExitStack() as stack:
        for name, port in ports.items():
            try:  # Held until all are tried, so that the same one twice is taken, too.
                stack.enter_context(socket.create_server(("127.0.0.1", int(port))))
            except OSError as error:
                raise ValueError(
                    f"{name} cannot have port {port} of 127.0.0.1 ({error.strerror}); is another `make ui` running? "
                    f"Choose another port: make ui PORT_{name.upper()}=..."
                ) from None


if __name__ == "__main__":
    raise SystemExit(command(main))
