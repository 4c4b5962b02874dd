"""A toy pipeline of real DVC stages for the tests of this folder: tiny, counting its executions, breakable.

As a script it is one stage: `python toy.py NAME`. It writes its name and settings to its output and one
line to `.scratch/count.txt`; `.scratch/slow-NAME` makes it take long, `.scratch/fail-NAME` makes it fail,
`.scratch/killed-NAME` lets the system kill it.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf, identity, planned, store
from tasks.runner import Context, run
from tests import prefect_database

HOUSE = Path(__file__).resolve().parents[2]

DVC_YAML = """\
stages:
  plan:
    cmd: exec python toy.py plan
    deps: [toy.py, conf, params.yaml, requirements]
    outs: [artifacts/plan]
  data:
    cmd: exec python toy.py data
    deps: [artifacts/plan/data.json]
    outs: [artifacts/data]
  train:
    matrix:
      system: ${systems}
      seed: ${seeds}
    cmd: exec python toy.py train@${item.system}-${item.seed}
    deps: ["artifacts/plan/train/${item.system}-${item.seed}.json", artifacts/data]
    outs: ["artifacts/train/${item.system}-${item.seed}"]
  evaluate:
    matrix:
      system: ${systems}
      seed: ${seeds}
    cmd: exec python toy.py evaluate@${item.system}-${item.seed}
    deps: ["artifacts/plan/evaluate/${item.system}-${item.seed}.json", "artifacts/train/${item.system}-${item.seed}"]
    outs: ["artifacts/evaluate/${item.system}-${item.seed}"]
  report:
    cmd: exec python toy.py report
    deps: [artifacts/plan/report.json, artifacts/evaluate]
    outs: [reports]
"""

PARAMS_YAML = """\
# Toy settings.
scale: small         # sizes
data: world          # where questions come from
data_folder: conf/data
model: tiny
retriever: bm25
generator: plain
engine: plain
systems: [a, b]      # two systems
seeds: [0]
evaluate:
  top_k: 3           # passages
  max_questions: 0
  num_bootstrap: 100
  sampled: false
  reference: a
"""

NAMES = ["plan", "data", "train@a-0", "train@b-0", "evaluate@a-0", "evaluate@b-0", "report"]
CONF = {
    "scale": ["small", "large"],
    "data": ["world"],
    "model": ["tiny"],
    "retriever": ["bm25", "dense"],
    "generator": ["plain"],
    "engine": ["plain"],
    "method": ["a", "b", "c"],
    "system": ["plain"],
}


class Toy:
    """A toy clone in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "dvc.yaml").write_text(DVC_YAML, encoding="utf-8")
        (root / "params.yaml").write_text(PARAMS_YAML, encoding="utf-8")
        (root / "toy.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        (root / ".gitignore").write_text("/artifacts/\n/reports/\n/.scratch/\n__pycache__/\n", encoding="utf-8")
        for kind, names in CONF.items():
            for name in names:
                store.write_json(root / "conf" / kind / f"{name}.yaml", {"name": name})
        (root / "requirements").mkdir(exist_ok=True)
        (root / "conf/data/none.txt").write_text("none\n", encoding="utf-8")
        (root / "requirements/run.txt").write_text("numpy==2.0.0\n", encoding="utf-8")
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        self.command("dvc", "init", "-q").check_returncode()
        prefect_database.give(root / ".scratch/prefect")

    def env(self, **more: str) -> dict[str, str]:
        """Environment of a command in the clone; tracking is off unless asked for."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "BREADCRUMB_"))}
        dvc = {"DVC_NO_ANALYTICS": "true", "DVC_SITE_CACHE_DIR": str(self.root / ".scratch/dvc-site")}
        python = {"PYTHONPATH": str(HOUSE), "PATH": path, "BREADCRUMB_TRACKING": "off"}
        return {**keep, **dvc, **python, **more}

    def command(self, module: str, *words: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m module words` in the clone."""
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.root,
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def flow(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`python -m flows.reproduce`, without Prefect unless the words say otherwise."""
        return self.command("flows.reproduce", *words, **env)

    def start(self, *words: str, **env: str) -> "subprocess.Popen[str]":
        """The flow in a process group of its own, left running."""
        return self.command_in_background("flows.reproduce", *words, **env)

    def command_in_background(self, module: str, *words: str, **env: str) -> "subprocess.Popen[str]":
        """`python -m module words` in a process group of its own, left running."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=self.root,
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # What a script runs in its background, such as these tests, has Ctrl-C ignored and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def counts(self) -> list[str]:
        """Stages executed so far, sorted by place in the pipeline."""
        path = self.root / ".scratch/count.txt"
        names = path.read_text(encoding="utf-8").split() if path.exists() else []
        return sorted(names, key=NAMES.index)

    def forget(self) -> None:
        """Start counting anew."""
        (self.root / ".scratch/count.txt").unlink(missing_ok=True)

    def flag(self, name: str, on: bool = True) -> None:
        """Make (or clear) a flag such as `fail-train@a-0`."""
        (self.root / ".scratch" / name).touch() if on else (self.root / ".scratch" / name).unlink()

    def wait_for(self, name: str, seconds: float = 40) -> None:
        """Wait until stage `name` is at work."""
        until = time.monotonic() + seconds
        while name not in self.counts():
            assert time.monotonic() < until, f"{name} did not start"
            time.sleep(0.05)

    def processes(self) -> list[str]:
        """Command lines of processes still at work in the clone."""
        import psutil

        found = []
        for process in psutil.process_iter(["cwd", "cmdline"]):
            if process.info["cwd"] == str(self.root):
                found.append(" ".join(process.info["cmdline"] or []))
        return found

    def bytes(self) -> dict[str, bytes]:
        """Every file of the outputs."""
        files = [p for f in ("artifacts", "reports") for p in (self.root / f).rglob("*") if p.is_file()]
        return {str(p.relative_to(self.root)): p.read_bytes() for p in files}


def kill_group(process: "subprocess.Popen[str]") -> None:
    """SIGKILL to the whole process group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Settings:
    """What a toy stage reads of the settings."""

    used: list[Any]


def plan(root: Path, *modules: str) -> None:
    """Write the plan of every stage: what it uses of `params.yaml`, the files of these modules, the libraries."""
    from tasks import params  # Only stage `plan` reads it: no other stage may load a file that its plan does not list.

    chosen = params.read(root)
    used: dict[str, list[Any]] = {"data": [chosen.data], "report": [list(chosen.systems), list(chosen.seeds)]}
    for item in (f"{system}-{seed}" for system in chosen.systems for seed in chosen.seeds):
        used |= {f"train@{item}": [chosen.scale], f"evaluate@{item}": [chosen.evaluate.top_k]}
    files = identity.Sources(identity.ROOT).used(["tasks.runner", *modules])
    libraries = store.digest(identity.libraries(root))
    with store.replacing_folder(root / planned.FOLDER) as folder:
        for name, settings in used.items():
            planned.write(folder, name, planned.Plan({"used": settings}, files, libraries))


def _stage(ctx: Context[Settings]) -> None:
    with (ctx.root / ".scratch/count.txt").open("a") as file:
        file.write(f"{ctx.name}\n")
    print(f"hello from {ctx.name}", flush=True)
    ctx.log(0, {"loss": 0.5})
    while (ctx.root / f".scratch/slow-{ctx.name}").exists():
        time.sleep(0.05)
    if (ctx.root / f".scratch/killed-{ctx.name}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (ctx.root / f".scratch/fail-{ctx.name}").exists():
        raise ValueError(f"toy.yaml: {ctx.name} was told to fail. Remove the flag.")
    group, _, item = ctx.name.partition("@")
    if group == "plan":
        plan(ctx.root)
    elif group == "report":
        systems, seeds = ctx.settings.used
        names = [f"{system}-{seed}" for system in systems for seed in seeds]
        rows = [(ctx.root / "artifacts/evaluate" / name / "out.txt").read_text().strip() for name in names]
        with store.replacing_folder(ctx.root / "reports") as folder:
            (folder / "results.md").write_text("| toy table |\n| --- |\n" + "".join(f"| {row} |\n" for row in rows))
    else:
        with store.replacing_folder(ctx.root / "artifacts" / group / item) as folder:
            (folder / "out.txt").write_text(f"{ctx.name} {ctx.settings.used[0]} {conf.CONF}\n")


if __name__ == "__main__":
    run(sys.argv[1], _stage, None if sys.argv[1] == "plan" else Settings)
