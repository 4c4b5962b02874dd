"""A cluster file that is missing or wrong, and a preset for more GPUs than there are, change nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows import reproduce
from tasks import cluster
from tasks.params import edit, places
from tests import shipped

HOUSE = Path(__file__).resolve().parents[2]
TWO = (
    "hosts:\n- {name: a, address: 10.0.0.1, workers: 8}\n- {name: b, address: 10.0.0.2, workers: 8, start: [ssh, b]}\n"
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of the house with a cluster of two hosts; a host without a GPU."""
    shutil.copytree(HOUSE / "conf", tmp_path / "conf")
    shutil.copyfile(shipped.root() / "params.yaml", tmp_path / "params.yaml")
    (tmp_path / "conf/cluster/mine.yaml").write_text(f"address: 10.0.0.1\n{TWO}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cluster.CLUSTER_VARIABLE, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpus(tmp_path, 0, monkeypatch)
    return tmp_path


def with_gpus(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this host have so many GPUs, by an nvidia-smi of its own."""
    lines = "".join(f"echo 'GPU {number}: Made-up (UUID: GPU-{number})'\n" for number in range(count))
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
    (folder / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def refused(root: Path, words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The real command says this in one line and leaves everything as it was."""
    before = {path: path.read_bytes() for path in root.rglob("*.yaml")}
    assert reproduce.main(["--no-prefect", *(part for word in words for part in ("--set", word))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}"), line
    assert {path: path.read_bytes() for path in root.rglob("*.yaml")} == before
    assert not (root / "artifacts").exists()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("mien", ["ENGINE=deepspeed"], "CLUSTER=mien: unknown cluster 'mien'. Did you mean 'mine'? Known: local, mi"),
        ("lcal", [], "CLUSTER=lcal: unknown cluster 'lcal'. Did you mean 'local'?"),
        ("../params", ["ENGINE=deepspeed"], "CLUSTER=../params: unknown cluster"),
        ("mine", [], "CLUSTER=mine: engine 'plain' and generator 'plain' work in one process of this host, so it"),
        ("mine", ["ENGINE=deepsped"], "params.yaml: unknown engine 'deepsped'. Did you mean 'deepspeed'?"),
        ("mine", ["GENERATOR=rows"], "CLUSTER=mine: engine 'plain' and generator 'rows' work in one process"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_not_there_or_has_no_effect(
    root: Path, name: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, name)
    refused(root, words, message, capsys)


def test_a_cluster_file_that_is_wrong(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, "mine")
    (root / "conf/cluster/mine.yaml").write_text("hosts: [{wrokers: 2}]")
    refused(root, ["ENGINE=deepspeed"], "conf/cluster/mine.yaml: hosts[0]: unknown key 'wrokers'. Did you m", capsys)


@pytest.mark.parametrize("name", ["", "local", "mine", "two-hosts"])
def test_a_cluster_that_a_run_uses_is_let_through(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, name)
    places.check_cluster({"engine": "deepspeed"}, root)
    places.check_cluster({"engine": "zero3_16", "generator": "vllm_16"}, root)
    places.check_cluster({"generator": "fleet"}, root)
    if name in ("", "local"):
        places.check_cluster({}, root)


@pytest.mark.parametrize(
    ("gpus", "visible", "chosen", "words", "message"),
    [
        (0, None, "", ["PRESET=3b-1gpu"], "PRESET=3b-1gpu: found no GPU on this host (nvidia-smi), expected 1. Presets "
         "are for GPUs. Without one, train a small model: MODEL=smollm2-135m SCALE=small."),
        (2, "", "", ["PRESET=3b-1gpu"], "PRESET=3b-1gpu: found no GPU on this host"),
        (1, None, "", ["PRESET=7b-8gpu"], "PRESET=7b-8gpu: found 1 GPU on this host (nvidia-smi), expected 8. Take "
         "PRESET=3b-1gpu, or name further hosts with CLUSTER="),
        (8, "0,3", "", ["SCALE=small", "PRESET=3b-8gpu"], "PRESET=3b-8gpu: found 2 GPUs on this host"),
        (8, None, "", ["PRESET=7b-2x8"], "PRESET=7b-2x8: found 8 GPUs on this host (nvidia-smi), expected 16. Take "
         "PRESET=3b-1gpu or PRESET=3b-8gpu or PRESET=7b-8gpu, or name"),
        (4, None, "mine", ["PRESET=7b-2x8"], "PRESET=7b-2x8: found 4 GPUs on this host (nvidia-smi), expected 8. Take "
         "PRESET=3b-1gpu, or"),
        (8, None, "mien", ["PRESET=7b-2x8"], "CLUSTER=mien: unknown cluster"),
        (8, None, "", ["PRESET=3b-9gpu"], "params.yaml: unknown preset '3b-9gpu'. Did you mean '3b-8gpu'?"),
    ],
)  # fmt: skip
def test_a_preset_for_more_gpus_than_there_are(
    root: Path, gpus: int, visible: str | None, chosen: str, words: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with_gpus(root, gpus, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, chosen)
    refused(root, words, message, capsys)


@pytest.mark.parametrize(
    ("gpus", "chosen", "words"),
    [
        (1, "", ["PRESET=3b-1gpu"]),
        (8, "", ["PRESET=7b-8gpu"]),
        (8, "mine", ["PRESET=7b-2x8"]),
        (2, "", ["PRESET=3b-8gpu", "ENGINE=deepspeed", "GENERATOR=fleet"]),
        (0, "", ["MODEL=smollm2-135m"]),
    ],
)
def test_a_preset_that_has_its_gpus_is_let_through(
    root: Path, gpus: int, chosen: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(root, gpus, monkeypatch)
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, chosen)
    places.check_preset(words, edit.parse(words, root), root)


def test_a_host_without_nvidia_smi_has_no_gpu(root: Path) -> None:
    (root / "bin/nvidia-smi").unlink()
    assert places.num_gpus() == 0
