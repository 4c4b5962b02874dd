"""A copy of the house in a temporary folder, with its real stages at their smallest size."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests import prefect_database, shipped

HOUSE = Path(__file__).resolve().parents[2]
SMOKE = {
    "scale": "smoke",
    "data": "smoke",
    "systems": "[base, search_r1_ppo]",
    "seeds": "[0]",
    "top_k": "3",
    "num_bootstrap": "100",
    "parts": "conf/parts/none.txt",
}
# Importing these takes most of a short stage's time: a server process has them, stages are forked from it.
LIBRARIES = [
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "sentencepiece",
    "bm25s",
    "numba",
    "Stemmer",
    "pydantic",
    "great_expectations",
]

PATIENCE = """\
timeout_s: 20.0
retries: 1
backoff_s: 0.01
max_backoff_s: 0.02
max_retry_after_s: 1.0
max_refused_in_a_row: 3
"""
"""How long a service of a test waits, and how often it asks again, as YAML."""

REWARD = '''\
"""A reward that nobody needs."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.rewards.answer import AnswerReward


@dataclass(frozen=True)
class MyReward(AnswerReward):
    """The answer, named differently."""


PART = MyReward
'''
METHOD = "extends: search_r1_grpo\ntitle: Mine\nrewards: {answer: null, %s: {metric: em}}\n"

PYTHON = """\
#!%s -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(%r)
server.sendall(json.dumps([os.getpid(), dict(os.environ), *sys.argv[1:]]).encode() + b"\\n")
sys.exit(int(server.makefile().readline()))
"""
"""First in the PATH of `dvc repro`, before the real `python`: asks for a forked process and ends with its exit code."""


def cut(path: Path, values: Mapping[str, str]) -> None:
    """Give these keys other values wherever a YAML file has them.

    Raises:
        ValueError: it lacks one.
    """
    text = path.read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"\b{key}: [^,}}\n]+", f"{key}: {value}", text)
        if not count:
            raise ValueError(f"{path}: found no {key} to cut")
    path.write_text(text, encoding="utf-8")


def _run_module(root: Path, env: dict[str, str], module: str, words: list[str], outputs: tuple[str, str]) -> None:
    """In the forked process: `python -m module words` with the code, folder, variables and files it is given."""
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() != HOUSE)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # This file, which the house imported.
    assert not any(name.partition(".")[0] == "tasks" for name in sys.modules), "the code must be the copy's own"
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_server() -> ForkServerContext:
    """Starts processes from one that has every library they load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


def _fork(root: Path, env: dict[str, str], module: str, words: list[str], outputs: tuple[str, str]) -> int:
    """`python -m module words` in a process that has the libraries; returns its exit code."""
    process = fork_server().Process(target=_run_module, args=(root, env, module, words, outputs))
    process.start()
    process.join(280)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@contextlib.contextmanager
def _forking_python(clone: Clone) -> Iterator[Path]:
    """A folder with a `python` that forks `python -m module words` instead of starting it."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            pid, env, option, module, *words = json.loads(self.rfile.readline())
            assert option == "-m"
            code = _fork(clone.root, env, module, words, (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"))
            self.wfile.write(f"{code}\n".encode())

    with tempfile.TemporaryDirectory() as folder:  # The path of a socket must be short.
        address, python = f"{folder}/socket", Path(folder, "python")
        python.write_text(PYTHON % (sys.executable, address), encoding="utf-8")
        python.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(address, Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield Path(folder)
            server.shutdown()


@dataclass(frozen=True)
class Clone:
    """One copy; everything in it may be changed."""

    root: Path

    @classmethod
    def make(cls, root: Path, smoke: bool = True) -> Clone:
        """Copy sources and settings; `smoke` sets the smallest sizes in `params.yaml` and has a Prefect database."""
        root.mkdir(parents=True)
        # What Python and numba compiled is taken along: it belongs to a file's time and size, which a copy keeps. Not
        # what another process is writing at this moment.
        patterns = shutil.ignore_patterns("*.pyc.*", "*.tmp.*", "cache", "tmp", "config.local")

        def ignore(folder: str, names: list[str]) -> set[str]:
            """What no copy needs, and parts that a user has added to this clone."""
            added = {name for name in names if Path(name).suffix in (".py", ".yaml")}
            return {*patterns(folder, names), *(one for one in added if not shipped.is_shipped(Path(folder, one)))}

        for name in ("tasks", "flows", "conf", "requirements", ".dvc"):
            shutil.copytree(HOUSE / name, root / name, ignore=ignore)
        for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
            shutil.copyfile(HOUSE / name, root / name)
        shutil.copyfile(shipped.root() / "params.yaml", root / "params.yaml")
        clone = cls(root)
        if smoke:
            prefect_database.give(root / ".scratch/prefect")
            for key, value in SMOKE.items():
                clone.set(key, value)
        return clone

    def copy(self, root: Path) -> Clone:
        """A copy of this copy, artifacts included."""
        shutil.copytree(self.root, root, symlinks=True)
        return Clone(root)

    def set(self, key: str, value: str) -> None:
        """Write a setting of `params.yaml`, whatever it was; `key` is the last part of its name."""
        path = self.root / "params.yaml"
        text, count = re.subn(rf"(?m)^( *{key}:) .*$", lambda found: f"{found[1]} {value}", path.read_text("utf-8"))
        assert count == 1, f"params.yaml has {count} keys {key!r}"
        path.write_text(text, encoding="utf-8")

    def change(self, path: str, old: str, new: str) -> None:
        """Replace text that must be there once at least."""
        text = (self.root / path).read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r} any more"
        (self.root / path).write_text(text.replace(old, new), encoding="utf-8")

    def add_method(self, name: str) -> None:
        """A reward file, and a method that uses it; `systems` stays as it is."""
        (self.root / f"tasks/rewards/{name}.py").write_text(REWARD, encoding="utf-8")
        (self.root / f"conf/method/{name}.yaml").write_text(METHOD % name, encoding="utf-8")

    def env(self) -> dict[str, str]:
        """Environment of a command: the copy's own code, no tracking, nothing of the caller's servers."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "BREADCRUMB_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        dvc = {"DVC_NO_ANALYTICS": "true", "DVC_SITE_CACHE_DIR": str(self.root / ".scratch/dvc-site")}
        return {**keep, **dvc, "PATH": path, "PYTHONPATH": str(self.root), "BREADCRUMB_TRACKING": "off"}

    def run(self, module: str, *words: str, timeout: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
        """`python -m module words` in the copy, with more variables."""
        command = [sys.executable, "-m", module, *words]
        env = {**self.env(), **env}
        return subprocess.run(
            command, cwd=self.root, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, module: str, *words: str, **env: str) -> subprocess.Popen[str]:
        """The same in the background, in a process group of its own; what it prints is thrown away."""
        command = [sys.executable, "-m", module, *words]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            command,
            cwd=self.root,
            env={**self.env(), **env},
            stdout=nothing,
            stderr=nothing,
            text=True,
            start_new_session=True,
        )

    def make_words(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """`make words` as a user types it, with this Python in the place of the clone's own; and its variables."""
        shutil.copyfile(HOUSE / "Makefile", self.root / "Makefile")
        (self.root / ".venv").mkdir(exist_ok=True)
        for name in ("bin", "lib", "pyvenv.cfg"):
            if not (self.root / ".venv" / name).exists():
                (self.root / ".venv" / name).symlink_to(Path(sys.prefix) / name)
        (self.root / ".venv/.made-from-run.txt").touch()
        command = ["make", "--old-file=.venv/.made-from-run.txt", *words]
        plain = {key: value for key, value in self.env().items() if not key.startswith("MAKE")}
        return command, {**plain, "BREADCRUMB_TRACKING": "on"}

    def stage(self, line: str) -> subprocess.CompletedProcess[str]:
        """One stage, such as `base --seed 0`, in a process of its own; a plan that is out of date is made first.

        Where planning fails, that is what is returned.
        """
        if line != "plan" and not self._is_planned():
            planning = self.stage("plan")
            if planning.returncode:
                return planning
        name, *words = line.split()
        return self._forked(f"tasks.stages.{name}", words)

    def pytest(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The copy's own tests, in a process of their own; the copy needs its `tests` and `pyproject.toml`."""
        return self._forked("pytest", ["-q", "-p", "no:cacheprovider", *words])

    def dvc(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`dvc words`; the stages that it runs are forked as in `stage`."""
        with _forking_python(self) as folder:
            return self.run("dvc", *words, timeout=500, PATH=f"{folder}{os.pathsep}{self.env()['PATH']}")

    def _forked(self, module: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            code = _fork(self.root, self.env(), module, words, (out.name, err.name))
            return subprocess.CompletedProcess([module, *words], code, out.read(), err.read())

    def _is_planned(self) -> bool:
        """Whether the plan is newer than code, settings and pins."""
        plan = self.root / "artifacts/plan"
        sources = [path for name in ("tasks", "conf", "requirements") for path in (self.root / name).rglob("*.*")]
        written = [path for path in sources if path.parent.name != "__pycache__"]  # Numba keeps files there, too.
        newest = max(path.stat().st_mtime_ns for path in [*written, self.root / "params.yaml"])
        return plan.is_dir() and plan.stat().st_mtime_ns > newest

    def must(self, *lines: str) -> None:
        """These stages, which must end well."""
        for line in lines:
            done = self.stage(line)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

    def files(self, *folders: str) -> dict[str, bytes]:
        """Every file below these folders, hidden ones included; an empty folder counts as a file without bytes."""
        found: dict[str, bytes] = {}
        for folder in folders or ("artifacts", "reports"):
            for path in sorted((self.root / folder).rglob("*")):
                if path.is_file() or not any(path.iterdir()):
                    found[str(path.relative_to(self.root))] = path.read_bytes() if path.is_file() else b""
        return found
