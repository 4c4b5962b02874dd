"""A `python` that forks `python -m module` from a process that has the libraries, for stages and their workers.

Starting a worker of DeepSpeed takes five seconds of a processor, nearly all of it imports. A forked process is one of
its own all the same: it can be killed, and what started it sees the signal.

Run as a program, this is the process that forks: `python forked.py SOCKET LINKED`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.cluster import Cluster

ORDER = ".scratch/kill.json"
"""In the clone: a `Kill` that the next stage is to suffer."""
KILLED = ".scratch/killed"
"""In the clone: is there once it was done."""
STAGE = "tasks.stages."
STARTED = "sitecustomize.py"
"""What Python runs when it starts, if it is in a folder of PYTHONPATH; a forked one has started long ago."""
LIBRARIES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed",
    "bm25s",
    "numba",
    "pydantic",
)

CLIENT = """\
#!%s -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(%r)
given = json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()
socket.send_fds(server, [len(given).to_bytes(8, "big")], [0, 1, 2])
server.sendall(given)
how, number = server.makefile().readline().split()
if how == "signal":
    os.kill(os.getpid(), int(number))
sys.exit(int(number))
"""


@dataclass(frozen=True)
class Kill:
    """A SIGKILL when a worker is told something.

    Attributes:
        module: of the worker, its last name.
        rank: of the worker.
        command: what it is told.
        count: how often, until the kill.
        delay_s: and how long after that.
        kills_stage: the stage is killed instead of the worker.
    """

    module: str
    rank: int
    command: str
    count: int = 1
    delay_s: float = 0.0
    kills_stage: bool = False


@contextlib.contextmanager
def forking_python(is_linked: bool = True) -> Iterator[Path]:
    """A folder with such a `python`.

    Args:
        is_linked: a forked process is killed when the process that asked for it is.
    """
    with tempfile.TemporaryDirectory() as folder:  # The path of a socket must be short.
        address, python = f"{folder}/socket", Path(folder, "python")
        python.write_text(CLIENT % (sys.executable, address), encoding="utf-8")
        python.chmod(0o755)
        words = [sys.executable, __file__, address, str(int(is_linked))]
        ending_with_us = [sys.executable, "-m", "tasks.lifetime", *words]  # Also where a time limit ends the tests.
        server = subprocess.Popen(ending_with_us, cwd=Path(__file__).parents[1], start_new_session=True)
        try:
            while not Path(address).exists():
                assert server.poll() is None
                time.sleep(0.05)
            yield Path(folder)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def cluster_of(folder: Path) -> Cluster:
    """This host alone, whose workers are forked by the `python` in that folder."""
    from tasks import cluster  # Not above: the process that forks must not have it.

    return cluster.Cluster(hosts=(cluster.HostConf(workers=64, python=f"{folder}/python"),))


# The process that forks.


def _serve(address: str, is_linked: bool) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    for name in LIBRARIES:
        importlib.import_module(name)

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)
    clients: dict[int, socket.socket] = {}
    stages: dict[str, int] = {}
    while True:
        readable, _, _ = select.select([listener, *(clients.values() if is_linked else ())], [], [], 0.01)
        for pid, client in clients.items():
            if client in readable:  # A client says nothing more, so this is its end.
                os.kill(pid, signal.SIGKILL)
        if listener in readable:
            client, _ = listener.accept()
            pid = _fork(client, listener, stages)
            clients[pid] = client
        while clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with clients.pop(pid) as client, contextlib.suppress(OSError):  # The client may have been killed.
                ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
                client.sendall(f"{ended}\n".encode())


def _fork(client: socket.socket, listener: socket.socket, stages: dict[str, int]) -> int:
    """Fork what a client asks for; `stages` gets the process of the last stage of each folder."""
    head, outputs, _, _ = socket.recv_fds(client, 8, 3)
    given = b""
    while len(given) < int.from_bytes(head, "big"):
        given += client.recv(65536)
    folder, environment, (_, module, *words) = json.loads(given)

    pid = os.fork()
    if pid:
        for output in outputs:
            os.close(output)
        if module.startswith(STAGE):
            stages[folder] = pid
        return pid

    code = 1
    try:
        listener.close()
        client.close()
        for number, output in enumerate(outputs):
            os.dup2(output, number)
            os.close(output)
        _become(folder, environment, module, words, stages.get(folder, 0))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(folder: str, environment: dict[str, str], module: str, words: list[str], stage: int) -> None:
    """In the forked process: `python -m module words` with this folder and these variables."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(Path(__file__).parent)))]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.argv[1:] = words
    for place in environment.get("PYTHONPATH", "").split(os.pathsep):
        if place and Path(place, STARTED).is_file():
            runpy.run_path(str(Path(place, STARTED)))
    order = Path(folder, ORDER)
    if order.exists() and not module.startswith(STAGE):
        _arm(Kill(**json.loads(order.read_text(encoding="utf-8"))), module, stage, Path(folder, KILLED))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _arm(order: Kill, module: str, stage: int, killed: Path) -> None:
    from tasks import crew

    if module.rpartition(".")[2] != order.module:
        return
    take, told = crew.Stage.take, 0
    victim = stage if order.kills_stage else os.getpid()

    def kill() -> None:
        killed.touch()
        os.kill(victim, signal.SIGKILL)

    def taking(self: Any) -> Any:
        nonlocal told
        message = take(self)
        if self.rank == order.rank and isinstance(message, tuple) and message[0] == order.command:
            told += 1
            if told == order.count:
                threading.Timer(order.delay_s, kill).start() if order.delay_s else kill()
        return message

    crew.Stage.take = taking  # type: ignore[method-assign]


def place(root: Path, order: Kill) -> None:
    """Let the next stage in this clone suffer it."""
    (root / KILLED).unlink(missing_ok=True)
    (root / ORDER).write_text(json.dumps(asdict(order)), encoding="utf-8")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2] == "1")
