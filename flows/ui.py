"""`make ui`: Prefect and MLflow on the loopback address, over what the runs of this clone have stored.

The servers end with this command. While it runs, pipeline runs of this clone report to this Prefect server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from flows.reproduce import UI_ADDRESS

SECONDS_TO_START = 90.0
MLFLOW = Path(".scratch/mlflow")


def main() -> int:
    """Start both, say where they are, wait for Ctrl-C."""
    prefect, mlflow = os.environ.get("PORT_PREFECT", "4200"), os.environ.get("PORT_MLFLOW", "5000")
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
        while all(server.poll() is None for server in servers.values()):
            time.sleep(0.5)
        raise ValueError("a server ended by itself; see .scratch/logs/prefect.txt and .scratch/logs/mlflow.txt.")
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


def _wait(name: str, server: subprocess.Popen[bytes], url: str, port: str) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ValueError(
                f"{name} did not start; is port {port} taken? See .scratch/logs/{name.lower()}.txt, or choose "
                f"another: make ui PORT_{name.upper()}=..."
            )
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise ValueError(f"{name} gave no answer at {url} within {SECONDS_TO_START:.0f} s.")


def _end(server: subprocess.Popen[bytes]) -> None:
    try:
        server.wait(8)
    except subprocess.TimeoutExpired:
        server.kill()


def _leave(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
