"""`make ui` starts Prefect and MLflow on the loopback address, with the runs that this clone has stored.

The servers end with this command. While it runs, pipeline runs of this clone report to this Prefect server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from flows.server import UI_ADDRESS

SECONDS_TO_START = 90.0
SECONDS_TO_SETTLE = 2.0  # A server whose port is taken ends sooner than this.
MLFLOW = Path(".scratch/mlflow")


def main() -> int:
    """Start both servers, print their addresses and wait for Ctrl-C; start neither if a port is taken."""
    ports = {"Prefect": os.environ.get("PORT_PREFECT", "4200"), "MLflow": os.environ.get("PORT_MLFLOW", "5000")}
    try:
        _check_ports(ports)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    prefect, mlflow = ports["Prefect"], ports["MLflow"]
    MLFLOW.mkdir(parents=True, exist_ok=True)
    UI_ADDRESS.parent.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{(MLFLOW / 'mlflow.db').resolve()}"
    artifacts = (MLFLOW / "artifacts").resolve().as_uri()
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    address = f"http://127.0.0.1:{prefect}/api"
    where = ["--backend-store-uri", database, "--artifacts-destination", artifacts]

    servers = {
        "Prefect": _start("prefect", ["server", "start", "--host", "127.0.0.1", "--port", prefect], address),
        "MLflow": _start(
            "mlflow",
            ["server", "--host", "127.0.0.1", "--port", mlflow, "--workers", "1", *where],
            address,
            **quiet,
        ),
    }
    signal.signal(signal.SIGTERM, _leave)

    try:
        _wait("Prefect", servers["Prefect"], f"{address}/health", prefect)
        UI_ADDRESS.write_text(address, encoding="utf-8")
        print(f"Prefect: http://127.0.0.1:{prefect}", flush=True)
        _wait("MLflow", servers["MLflow"], f"http://127.0.0.1:{mlflow}/health", mlflow)
        print(f"MLflow:  http://127.0.0.1:{mlflow}", flush=True)
        print("Ctrl-C ends both.", flush=True)

        while True:
            for name, server in servers.items():
                if server.poll() is not None:
                    _raise_ended(name, server, ports[name])
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        UI_ADDRESS.unlink(missing_ok=True)
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            _end(server)


def _start(module: str, words: list[str], address: str, **env: str) -> subprocess.Popen[bytes]:
    log = Path(".scratch/logs") / f"{module}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **env, "PREFECT_API_URL": address},
        )


def _check_ports(ports: Mapping[str, str]) -> None:
    """Refuse ports that are no numbers, the same one twice, or taken: the program on it would answer in our place."""
    for name, port in ports.items():
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"PORT_{name.upper()}={port!r}, expected a number from 1 to 65535.")
    if len({int(port) for port in ports.values()}) < len(ports):
        both = " and ".join(f"PORT_{name.upper()}={port}" for name, port in ports.items())
        raise ValueError(f"{both}: each server needs a port of its own.")
    for name, port in ports.items():
        with socket.socket() as probe:
            # Servers set this option, too. Without it a port that was just freed would look taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
            except OSError as error:
                raise ValueError(
                    f"{name} cannot have port {port} of 127.0.0.1 ({error.strerror}); is another `make ui` running? "
                    f"{_another(name)}"
                ) from None


def _another(name: str) -> str:
    return f"Choose another port: make ui PORT_{name.upper()}=..."


def _wait(name: str, server: subprocess.Popen[bytes], url: str, port: str) -> None:
    """Wait until it answers and still lives a moment later; the answer alone may be another server's on that port."""
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if server.poll() is not None:
            _raise_ended(name, server, port)
        try:
            with urllib.request.urlopen(url, timeout=2):
                break
        except OSError:
            time.sleep(0.3)
    else:
        raise ValueError(f"{name} gave no answer at {url} within {SECONDS_TO_START:.0f} s.")
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(SECONDS_TO_SETTLE)
        _raise_ended(name, server, port)


def _raise_ended(name: str, server: subprocess.Popen[bytes], port: str) -> NoReturn:
    raise ValueError(
        f"{name} on port {port} ended by itself (exit status {server.returncode}); see "
        f".scratch/logs/{name.lower()}.txt. If another program has the port: {_another(name)}"
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    try:
        server.wait(8)
    except subprocess.TimeoutExpired:
        server.kill()


def _leave(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
