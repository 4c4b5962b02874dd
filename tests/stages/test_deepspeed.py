"""`engine: deepspeed` in the pipeline: bare DVC and the flow agree to the byte, and kills lose nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.stages.clone import Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

FLOW = ("flows.reproduce", "--no-prefect")
TRAIN = "train --system search_r1_ppo --seed 0"
NUM_KILLS = 20


def made(root: Path) -> Clone:
    clone = Clone.make(root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    clone.set("engine", "deepspeed")
    return clone


def trained(clone: Clone) -> dict[str, bytes]:
    return clone.files("artifacts/train", "artifacts/evaluate")


@pytest.fixture(scope="module")
def by_flow(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    clone = made(tmp_path_factory.mktemp("flow") / "clone")
    done = clone.run(*FLOW, BREADCRUMB_TRACKING="on", timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return clone


def test_bare_dvc_gives_the_same_bytes_and_a_second_run_executes_nothing(by_flow: Clone, tmp_path: Path) -> None:
    ledger = by_flow.root / ".scratch/ledger"
    before = {path.name: path.stat().st_mtime_ns for path in ledger.iterdir()}
    assert by_flow.run(*FLOW).returncode == 0
    assert {path.name: path.stat().st_mtime_ns for path in ledger.iterdir()} == before

    clone = made(tmp_path / "clone")
    done = clone.dvc("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained(clone) == trained(by_flow)


def test_mlflow_has_one_run_of_a_training_with_two_workers(by_flow: Clone) -> None:
    from mlflow.tracking import MlflowClient

    assert by_flow.run("tasks.runner.upload").returncode == 0
    client = MlflowClient(f"sqlite:///{by_flow.root}/.scratch/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("breadcrumb")
    assert experiment is not None
    names = [run.info.run_name for run in client.search_runs([experiment.experiment_id])]
    assert names.count("train@search_r1_ppo-0") == 1


def processes(module: str, root: Path) -> list[int]:
    """Ids of the processes that run this module in that folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if module in words and (folder / "cwd").resolve() == root.resolve():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def test_killed_at_any_point_it_leaves_no_process_and_goes_on_to_the_same_bytes(by_flow: Clone, tmp_path: Path) -> None:
    """The controller or one of two workers is killed at a random time; every attempt gets a little further."""
    clone = by_flow.copy(tmp_path / "clone")
    wanted = trained(clone)
    for path in (clone.root / ".scratch/work").glob("train@*"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    subprocess.run(["rm", "-r", str(clone.root / "artifacts/train/search_r1_ppo-0")], check=True)

    draw, kinds, lines = random.Random(0), ["controller", "worker"], []
    for number in range(NUM_KILLS):
        stage = subprocess.Popen(
            ["python", "-m", f"tasks.stages.{TRAIN.split()[0]}", *TRAIN.split()[1:]], cwd=clone.root, env=clone.env(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 120
        while len(workers := processes("tasks.engine.deepspeed_worker", clone.root)) < 2 and stage.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 14))
        if stage.poll() is not None:
            break
        victim = stage.pid if kinds[number % 2] == "controller" else draw.choice(workers)
        os.kill(victim, signal.SIGKILL)
        printed, _ = stage.communicate(timeout=60)
        if kinds[number % 2] == "worker":
            lines += [line for line in printed.splitlines() if line.startswith("error: ")]
        until = time.monotonic() + 15
        while processes("tasks.engine.deepspeed_worker", clone.root):
            assert time.monotonic() < until, "a worker has survived its stage"
            time.sleep(0.1)

    clone.must(TRAIN)
    assert {name: content for name, content in trained(clone).items() if "train" in name} == {
        name: content for name, content in wanted.items() if "train" in name
    }
    pattern = (
        r"error: worker [01] on localhost, in [\w ]+: it was ended by signal 9\. .*Start again: the run continues\."
    )
    assert lines
    assert all(re.fullmatch(pattern, line) for line in lines), lines
