"""`make ui`, ports that other programs have, and a run that starts Prefect; no server is started here."""

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import reproduce, ui


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
    assert ui.main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name} cannot have port {taken} of 127.0.0.1 (Address already in use)")
    assert f"make ui PORT_{name.upper()}=..." in said
    assert ui.UI_ADDRESS.read_text() == "of the one that runs"
    assert not (tmp_path / ".scratch/logs").exists()


@pytest.mark.parametrize(
    ("prefect", "mlflow", "words"),
    [
        ("42x", "5000", "PORT_PREFECT='42x', expected a number from 1 to 65535"),
        ("4200", "65536", "PORT_MLFLOW='65536', expected"),
        ("", "5000", "PORT_PREFECT='', expected"),
        ("4200", "4200", "PORT_PREFECT=4200 and PORT_MLFLOW=4200: each server needs a port of its own"),
    ],
)
def test_ports_that_cannot_be_are_named(prefect: str, mlflow: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ui._check_ports({"Prefect": prefect, "MLflow": mlflow})


def test_free_ports_and_ports_just_left_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # The side that closes first keeps the port for a minute, in TIME_WAIT.
            client.recv(1)
    ui._check_ports({"Prefect": str(port), "MLflow": _free()})


def test_the_answer_of_a_foreign_server_is_not_taken_for_that_of_a_child_which_ends(taken: str) -> None:
    words = rf"MLflow on port {taken} ended by itself \(exit status 3\).*mlflow\.txt.*make ui PORT_MLFLOW=\.\.\."
    with _child(0.5) as child, pytest.raises(ValueError, match=words):
        ui._wait("MLflow", child, f"http://127.0.0.1:{taken}/health", taken)


def test_a_child_that_stays_is_believed(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "SECONDS_TO_SETTLE", 0.2)
    with _child(30) as child:
        ui._wait("Prefect", child, f"http://127.0.0.1:{taken}/health", taken)
        assert child.poll() is None
        child.kill()


def test_a_server_that_ends_later_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = _free()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT_PREFECT", _free())
    monkeypatch.setenv("PORT_MLFLOW", port)
    monkeypatch.setattr(ui, "_start", lambda module, *_, **__: _child(0.2 if module == "mlflow" else 30))
    monkeypatch.setattr(ui, "_wait", lambda *_: None)
    assert ui.main() == 1
    assert f"error: MLflow on port {port} ended by itself (exit status 3)" in capsys.readouterr().err
    assert not ui.UI_ADDRESS.exists()


def test_a_run_that_waits_for_a_temporary_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import flow

    said: list[str] = []
    ended, graph = threading.Event(), SimpleNamespace(stale={"plan"}, needs={})
    run: Any = SimpleNamespace(
        root=tmp_path, graph=graph, say=said.append, outcomes={}, has_ended=ended, is_free=threading.Event()
    )
    monkeypatch.setattr(flow, "reproduce", lambda form, return_state: ended.set())
    monkeypatch.setattr(flow, "temporary_settings", lambda **changes: contextlib.nullcontext())
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    reproduce.run_here(run, use_prefect=True)
    assert said == ["starting Prefect, which records this run ..."]
