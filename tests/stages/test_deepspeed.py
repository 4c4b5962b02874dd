"""`engine: deepspeed` in the pipeline, with a fleet of generators: DVC and flow agree to the byte, kills lose nothing.

One file, so that one process makes the clone in which all was trained.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import forked
from tests.forked import Kill, forking_python
from tests.stages.clone import Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

FLOW = ("flows.reproduce", "--no-prefect")
STAGE = "train@search_r1_ppo-0"
TRAINED = "artifacts/train/search_r1_ppo-0"
FORKED = "hosts: [{workers: 64, python: %s/python}]\n"
"""A cluster file whose workers are forked."""


@dataclass(frozen=True)
class Place:
    """A clone in which DVC has run everything, and the folder of a `python` that forks."""

    clone: Clone
    python: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command whose stages and workers are forked."""
        path = f"{self.python}{os.pathsep}{self.clone.env()['PATH']}"
        env = self.clone.env() | {"PATH": path, "BREADCRUMB_CLUSTER": "forked"}
        return subprocess.run(words, cwd=self.clone.root, env=env, capture_output=True, text=True, timeout=500)

    def forget(self) -> None:
        """Nothing of the training is left, also in what DVC keeps."""
        root = self.clone.root
        shutil.rmtree(root / TRAINED, ignore_errors=True)
        shutil.rmtree(root / ".dvc/cache/runs", ignore_errors=True)
        for path in (root / ".scratch/work").glob(f"{STAGE}-*"):
            shutil.rmtree(path)
        lock = yaml.safe_load((root / "dvc.lock").read_text(encoding="utf-8"))
        lock["stages"].pop(STAGE, None)
        (root / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    clone = Clone.make(tmp_path_factory.mktemp("dvc") / "clone")
    subprocess.run(["git", "init", "-q", str(clone.root)], check=True)
    clone.set("engine", "deepspeed")
    clone.set("generator", "fleet")
    with forking_python(is_linked=False) as folder:
        (clone.root / "conf/cluster/forked.yaml").write_text(FORKED % folder, encoding="utf-8")
        made = Place(clone, folder)
        done = made.run("dvc", "repro")
        assert done.returncode == 0, done.stdout + done.stderr
        yield made


def executed(clone: Clone) -> dict[str, int]:
    """When each stage ended last."""
    return {path.stem: path.stat().st_mtime_ns for path in (clone.root / ".scratch/ledger").glob("*.json")}


def test_the_flow_gives_the_same_bytes_as_dvc_and_mlflow_has_one_run_each(place: Place, tmp_path: Path) -> None:
    """The flow makes the training again, with processes that are started and not forked."""
    from mlflow.tracking import MlflowClient

    flow = Place(place.clone.copy(tmp_path / "clone"), place.python)
    flow.forget()
    before = executed(flow.clone)
    done = flow.clone.run(*FLOW, "--set", "engine=deepspeed", BREADCRUMB_TRACKING="on")
    assert done.returncode == 0, done.stdout + done.stderr
    after = executed(flow.clone)
    assert [stage for stage in after if after[stage] != before.get(stage)] == [STAGE]
    assert flow.clone.files(TRAINED) == place.clone.files(TRAINED)
    for line in ("[0 localhost] ", "[1 localhost] "):
        assert line not in done.stdout  # Workers have nothing to say.

    measured = json.loads((flow.clone.root / f".scratch/ledger/{STAGE}.json").read_text(encoding="utf-8"))
    memory = measured["memory"]
    assert memory["sum_mb"] > memory["stage_mb"] + memory["largest_worker_mb"]  # Two of the engine, two of the fleet.
    assert measured["limit"]["device"] == "2 x processor, 1 thread, float32"
    assert 0 < measured["work"]["flop"] / measured["work"]["learn_s"] < measured["limit"]["flop_per_s"]

    assert flow.clone.run(*FLOW).returncode == 0
    assert executed(flow.clone) == after

    assert flow.clone.run("tasks.runner.upload").returncode == 0
    client = MlflowClient(f"sqlite:///{flow.clone.root}/.scratch/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("breadcrumb")
    assert experiment is not None
    names = [run.info.run_name for run in client.search_runs([experiment.experiment_id])]
    assert names.count(STAGE) == 2  # One for each time it was made, not for each worker.


ZERO, FLEET = "deepspeed_worker", "fleet_worker"
FATAL = [
    # From the start: whoever is killed, in whatever.
    Kill(ZERO, 0, "meet"),
    Kill(ZERO, 1, "join"),
    Kill(ZERO, 0, "build", delay_s=0.1),
    Kill(ZERO, 0, "read", kills_stage=True),
    Kill(ZERO, 1, "update"),
    Kill(ZERO, 0, "update", 4, delay_s=0.02),
    Kill(ZERO, 1, "weights"),
    Kill(FLEET, 1, "weight", 5, kills_stage=True),
    Kill(ZERO, 0, "save", delay_s=0.01),
    Kill(ZERO, 1, "save", 2),
    # While the second checkpoint is written: from now on there is the first.
    Kill(ZERO, 0, "save", 3),
    Kill(ZERO, 0, "load"),
    Kill(ZERO, 0, "load", kills_stage=True),
    Kill(ZERO, 1, "update", 2, delay_s=0.02),
    Kill(FLEET, 0, "advance", 3, kills_stage=True),
    Kill(ZERO, 0, "weights", 2),
    Kill(ZERO, 0, "save", delay_s=0.01, kills_stage=True),
    # And now the second.
    Kill(ZERO, 1, "save", 3),
    Kill(ZERO, 0, "update", 3, delay_s=0.01, kills_stage=True),
]
"""Each ends the stage."""
HARMLESS = [Kill(FLEET, 1, "advance", 3, delay_s=0.01), Kill(FLEET, 0, "weight", 7)]
"""A generator: the others play its rows, and with the next weights another takes its place."""


def children(root: Path) -> list[int]:
    """Ids of the processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == root.resolve():
                found.append(int(path.name))
        except OSError:  # It has ended.
            continue
    return found


def test_killed_in_whatever_it_does_training_goes_on_to_the_same_bytes(place: Place, tmp_path: Path) -> None:
    expected = place.clone.files(TRAINED)
    killed = Place(place.clone.copy(tmp_path / "clone"), place.python)
    root = killed.clone.root
    train = ("python", "-m", "tasks.stages.train", "--system", "search_r1_ppo", "--seed", "0")
    killed.forget()
    for order in FATAL:
        forked.place(root, order)
        done = killed.run(*train)
        text = done.stdout + done.stderr
        assert (root / forked.KILLED).exists(), f"{order} was not reached: {text}"
        assert done.returncode != 0, order
        assert not (root / TRAINED).exists(), order
        until = time.monotonic() + 15
        while children(root):
            assert time.monotonic() < until, f"{order}: a process has survived its stage"
            time.sleep(0.05)
        if order.kills_stage:
            continue
        (line,) = (line for line in text.splitlines() if line.startswith("error: "))
        phase = r"\w+" if order.delay_s else order.command
        pattern = (
            rf"error: worker {order.rank} on localhost, in {phase}: it was ended by signal 9\. .*the run continues\."
        )
        assert re.fullmatch(pattern, line), (order, line)

    (root / forked.ORDER).unlink()
    done = killed.run(*train)
    assert done.returncode == 0, done.stdout + done.stderr
    assert killed.clone.files(TRAINED) == expected

    for order in HARMLESS:
        killed.forget()
        forked.place(root, order)
        done = killed.run(*train)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (
            f"worker {order.rank} on localhost, in {order.command}: it was ended by signal 9. The others go"
            in done.stdout
        )
        assert killed.clone.files(TRAINED) == expected


# Stages that teach -----------------------------------------------------------------------------------------------

PLAYED = ("trajectories --reward_model pica --seed 0", "labels --reward_model pica --seed 0")
BASE = "base --seed 0"
TAUGHT = {
    BASE: "artifacts/base/0",
    "start --start r_search --seed 0": "artifacts/models/r_search-0",
    "reader --reader tiny_llama --seed 0": "artifacts/models/tiny_llama-0",
    "reward_model --reward_model pica --seed 0": "artifacts/models/pica-0",
}
"""Each stage, and what it makes."""


def must(place: Place, *stages: str) -> None:
    for stage in stages:
        name, *words = stage.split()
        done = place.run("python", "-m", f"tasks.stages.{name}", *words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def taught(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A copy in which all of them were taught."""
    made = Place(place.clone.copy(tmp_path_factory.mktemp("taught") / "clone"), place.python)
    models = {"reward_models": "pica", "readers": "tiny_llama", "starts": "r_search", "tools": "r_search"}
    for key, value in ({"systems": "base, pica, r_search"} | models).items():
        made.clone.set(key, f"[{value}]")
    must(made, "plan", *PLAYED, *(stage for stage in TAUGHT if stage != BASE))
    return made


@pytest.mark.parametrize("stage", TAUGHT)
def test_a_killed_worker_ends_the_stage_in_one_line_and_it_goes_on_to_the_same_bytes(
    taught: Place, tmp_path: Path, stage: str
) -> None:
    killed = Place(taught.clone.copy(tmp_path / "clone"), taught.python)
    root, (name, *words) = killed.clone.root, stage.split()
    expected = killed.clone.files(TAUGHT[stage])
    assert expected
    for path in (root / ".scratch/work").glob(f"{name}@*"):
        shutil.rmtree(path)  # The checkpoints of the training that was not disturbed.

    # The third update of a process: of the reward model the first after its checkpoint, of all others before one.
    forked.place(root, Kill(ZERO, 1, "update", 3))
    done = killed.run("python", "-m", f"tasks.stages.{name}", *words)
    assert (root / forked.KILLED).exists(), done.stdout + done.stderr
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    said = r"error: worker 1 on localhost, in update: it was ended by signal 9\. .*the run continues\."
    assert re.fullmatch(said, line)
    assert killed.clone.files(TAUGHT[stage]) == expected  # What was made before is still there.

    (root / forked.ORDER).unlink()
    must(killed, stage)
    assert killed.clone.files(TAUGHT[stage]) == expected


def test_the_plain_engine_makes_the_same_model_but_for_the_order_of_sums(taught: Place, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    plain = Place(taught.clone.copy(tmp_path / "clone"), taught.python)
    plain.clone.set("engine", "plain")
    must(plain, "plan", BASE)
    ours, theirs = (load_file(one.clone.root / TAUGHT[BASE] / "policy/model.safetensors") for one in (taught, plain))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-2)
        assert float((tensor - theirs[key]).abs().mean()) < 1e-4, key
