"""`make ui`: ports that other programs have, and servers that end; no server is started here."""

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import command, server, ui


@pytest.fixture
def taken() -> Iterator[str]:
    """A port of a foreign server that answers 200 to everything."""

    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield str(server.server_port)
        server.shutdown()


def _free() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def _child(seconds: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds}); raise SystemExit(3)"])


@pytest.mark.parametrize("name", ["Prefect", "MLflow"])
def test_a_taken_port_is_refused_before_anything_starts(
    name: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT_PREFECT", taken if name == "Prefect" else _free())
    monkeypatch.setenv("PORT_MLFLOW", taken if name == "MLflow" else _free())
    ui.UI_ADDRESS.parent.mkdir(parents=True)
    ui.UI_ADDRESS.write_text("of the one that runs")
    assert command(ui.main) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name} cannot have port {taken} of 127.0.0.1 (Address already in use")
    assert f"make ui PORT_{name.upper()}=..." in said
    assert ui.UI_ADDRESS.read_text() == "of the one that runs"
    assert not (tmp_path / ".scratch/logs").exists()


@pytest.mark.parametrize(
    ("prefect", "mlflow", "words"),
    [
        ("42x", "5000", "PORT_PREFECT='42x', expected a number from 1 to 65535"),
        ("4200", "65536", "PORT_MLFLOW='65536', expected"),
        ("", "5000", "PORT_PREFECT='', expected"),
    ],
)
def test_ports_that_cannot_be_are_named(prefect: str, mlflow: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ui.check_ports({"Prefect": prefect, "MLflow": mlflow})


def test_each_server_needs_a_port_of_its_own() -> None:
    port = _free()
    with pytest.raises(ValueError, match=f"MLflow cannot have port {port} of 127.0.0.1"):
        ui.check_ports({"Prefect": port, "MLflow": port})


def test_free_ports_and_ports_just_left_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # The side that closes first keeps the port for a minute, in TIME_WAIT.
            client.recv(1)
    ui.check_ports({"Prefect": str(port), "MLflow": _free()})


def test_a_server_that_ends_is_named_and_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with server.child(["nowhere.to_be_found"], log) as gone, pytest.raises(ValueError, match="MLflow ended by itself"):
        server.wait_for(gone, "MLflow", f"http://127.0.0.1:{_free()}/health", log)
    assert "No module named" in log.read_text()


def test_a_server_that_ends_later_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def child(words: list[str], log: Path, **how: Any) -> Iterator[Any]:
        with _child(0.2 if words[0] == "flows.mlflow_server" else 30) as process:
            yield process
            process.kill()

    @contextlib.contextmanager
    def started(root: Path, port: int) -> Iterator[Any]:
        with child([""], root) as process:
            yield "http://127.0.0.1:1/api", process

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT_PREFECT", _free())
    monkeypatch.setenv("PORT_MLFLOW", _free())
    monkeypatch.setattr(ui, "child", child)
    monkeypatch.setattr(ui, "started", started)
    monkeypatch.setattr(ui, "wait_for", lambda *_: None)
    assert command(ui.main) == 1
    assert "error: MLflow ended by itself (exit status 3)" in capsys.readouterr().err
    assert not ui.UI_ADDRESS.exists()
