"""The order of stages, and what is repaired after a kill; no stage runs here."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import networkx
import pytest
from dvc.repo import Repo

from flows import dag


def test_repair_leaves_a_sound_clone_alone(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  data:\n    cmd: x\n")
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / ".dvc/tmp/rwlock").write_text("{}")
    assert dag.repair(tmp_path) == []
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  data: {")
    assert dag.repair(tmp_path) == ["removed the torn dvc.lock"]
    (tmp_path / ".dvc/tmp/rwlock").write_text("")
    assert dag.repair(tmp_path) == []
    assert not (tmp_path / ".dvc/tmp/rwlock").exists()


def test_what_most_others_wait_for_comes_first() -> None:
    """As in dvc.yaml: two leaves beside a long path."""
    needs = {
        "data": (), "index": ("data",), "recall": ("index",), "base@0": ("index",), "base@1": ("index",),
        "train@0": ("base@0",), "train@1": ("base@1",), "report": ("recall", "train@0", "train@1"),
    }  # fmt: skip
    graph = networkx.DiGraph((need, name) for name, others in needs.items() for need in others)
    order = list(dag.ordered(graph))
    assert order == ["data", "index", "base@0", "base@1", "recall", "train@0", "train@1", "report"]
    assert all(order.index(need) < order.index(name) for name, others in needs.items() for need in others)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a stage that has run: a table and a folder of weights are its outputs."""
    root = tmp_path_factory.mktemp("done")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / "make.sh").write_text("mkdir -p policy; echo em,0.500000 > results.csv; echo weights > policy/w\n")
    stage = {"cmd": "sh make.sh", "deps": ["make.sh"], "outs": ["results.csv", "policy"]}
    (root / "dvc.yaml").write_text(json.dumps({"stages": {"report": stage}}))
    with contextlib.chdir(root), Repo.init() as repo:
        repo.reproduce()
    return root


@pytest.mark.parametrize(
    ("name", "text"), [("results.csv", "em,0.999999\n"), ("policy/w", "wEights\n"), ("policy/w", "weights\t")]
)
def test_bits_that_flip_while_the_time_stays_run_the_stage_again(
    done: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done)
    assert dag.read(done).stale == set()
    path = done / name
    before, whole = path.stat(), path.read_text(encoding="utf-8")
    assert len(whole) == len(text)
    path.chmod(0o644)
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert dag.read(done).stale == {"report"}

    with Repo() as repo:
        repo.reproduce()
    assert path.read_text(encoding="utf-8") == whole
    assert dag.read(done).stale == set()


def test_a_clone_without_its_outputs_and_a_stage_that_never_ran_are_no_damage(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "fresh"
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    for name in (".dvc/config", "dvc.yaml", "dvc.lock", "make.sh"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text((done / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert dag.read(root).stale == {"report"}
    (root / "dvc.lock").unlink()
    assert dag.read(root).stale == {"report"}
    (root / "policy").mkdir()  # Without the list of its files, which lies in the cache.
    (root / "dvc.lock").write_text((done / "dvc.lock").read_text(encoding="utf-8"), encoding="utf-8")
    assert dag.read(root).stale == {"report"}
