"""Hosts of a cluster file before a run: whether they answer, are alike, and have GPUs enough. Hosts are made-up."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import cluster, params
from tasks.plan import RunSettings, hosts, preflight
from tasks.plan.machine import Machine, Memory
from tests import shipped

HOUSE = Path(__file__).parents[2]
LARGE = Memory(10**15, "a test")
PROCESSOR = Machine(LARGE, None, True, False)
CLUSTER = """\
hosts:
- {name: a, workers: 8}
- {name: b, workers: 8, start: [env, PYTHONPATH=%s]}
"""


def gpus(count: int, has_bfloat16: bool = True) -> Machine:
    return Machine(LARGE, Memory(85 * 10**9, "GPU of a test"), True, has_bfloat16, count)


def run_of(root: Path, text: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> RunSettings:
    """A run of the house with a cluster file of this content."""
    shutil.copytree(HOUSE / "conf", root / "conf", dirs_exist_ok=True)
    (root / "conf/cluster/mine.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, "mine")
    chosen = {"systems": ("base", "search_r1_grpo"), "scale": "paper", **changes}
    return RunSettings(root, params.with_models(replace(shipped.settings(), **chosen), root))


@pytest.mark.parametrize(
    ("changes", "here", "message"),
    [
        ({"engine": "plain"}, gpus(1), ""),
        ({"engine": "zero3_8"}, PROCESSOR, ""),
        ({"engine": "zero3_8"}, gpus(8), ""),
        (
            {"engine": "zero3_8"},
            gpus(1),
            "conf/engine/zero3_8.yaml: workers: 8 of them are placed on localhost, which has 1 GPU, expected one for "
            "each. Lower the number, take PRESET=3b-1gpu, or let CLUSTER= name more hosts.",
        ),
        (
            {"engine": "plain", "generator": "vllm_8"},
            gpus(2),
            "conf/generator/vllm_8.yaml: 8 generators on 2 GPUs take 2 of the memory of one (gpu_memory_utilization",
        ),
        ({"engine": "plain", "generator": "vllm_8"}, gpus(4), ""),
    ],
)  # fmt: skip
def test_gpus_of_this_host(
    changes: dict[str, Any], here: Machine, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "hosts: [{workers: 64}]\n", monkeypatch, **changes)
    found = hosts.problem(run, here)
    assert found.startswith(message) if message else not found, found


def test_devices_that_a_host_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "hosts: [{workers: 8, devices: [0, 4]}]\n", monkeypatch, engine="deepspeed")
    assert hosts.problem(run, gpus(8)) == ""
    expected = "conf/cluster/mine.yaml: localhost: devices=[0, 4]: expected numbers below 4: the host has 4 GPUs."
    assert hosts.problem(run, gpus(4)) == expected
    run = run_of(tmp_path, "hosts: [{workers: 8, devices: [0]}]\n", monkeypatch, engine="deepspeed")
    assert "workers: 2 of them are placed on localhost, which has 4 GPUs" in hosts.problem(run, gpus(4))


def test_a_generator_that_divides_its_model_among_more_gpus_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "hosts: [{}]\n", monkeypatch, generator="vllm")
    assert hosts.problem(run, gpus(1)) == ""
    path = tmp_path / "conf/generator/vllm.yaml"
    path.write_text(path.read_text().replace("tensor_parallel_size: 1", "tensor_parallel_size: 2"))
    run = RunSettings(run.root, run.params)
    assert hosts.problem(run, gpus(1)).startswith(
        "conf/generator/vllm.yaml: tensor_parallel_size=2: expected at most 1"
    )
    assert hosts.problem(run, gpus(2)) == ""


SEEN = """\
import torch
torch.cpu.get_capabilities = lambda: {'avx512_bf16': %s}
"""


def test_a_second_host_is_asked_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in the way in which its worker would be started; it says that it has no bfloat16."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b/sitecustomize.py").write_text(SEEN % False)
    run = run_of(tmp_path, CLUSTER % (tmp_path / "b"), monkeypatch, engine="zero3_16")
    found = hosts.problem(run, PROCESSOR)
    assert found.startswith(
        "conf/cluster/mine.yaml: b computes in float32, and a in bfloat16, because not every processor has"
    ), found
    assert "Set `train: {dtype: float32}` in conf/scale/paper.yaml" in found
    assert hosts.problem(run, replace(PROCESSOR, host_has_bfloat16=False)) == ""
    assert hosts.problem(run, gpus(8)).startswith(
        "conf/cluster/mine.yaml: b computes on a processor, and a on a GPU: expected"
    )


def test_a_second_host_that_is_not_there_is_said_before_anything_is_taught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CLUSTER.replace("env, PYTHONPATH=%s", "no-such-shell, b")
    run = run_of(tmp_path, text, monkeypatch, engine="zero3_16", scale="laptop")
    machine = replace(PROCESSOR, host=LARGE)
    monkeypatch.setattr(preflight, "free_disk", lambda folder: 10**15)
    with pytest.raises(
        ValueError, match=r"^worker 0 on b, in start: it ended with status 1\. Its last line: no-such-sh"
    ):
        preflight.check(run, lambda: machine)
    monkeypatch.setenv(preflight.VARIABLE, "warn")
    preflight.check(run, lambda: machine)
    assert capsys.readouterr().err.startswith("warning: worker 0 on b, in start: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hosts: [{workers: 4, interface: nosuch}]",
            "worker 0 on localhost, in machine: interface='nosuch': expected a network device of this host: "
            r".*\blo\b.* If it is a mistake of conf/cluster/mine\.yaml, mend it\.",
        ),
        (
            "hosts: [{workers: 4, address: 192.0.2.7}]",
            r"worker 0 on localhost, in machine: address='192\.0\.2\.7': expected an address of this host",
        ),
        (
            "{address: 127.0.0.2, hosts: [{workers: 4, address: 300.1.1.1}]}",
            "worker 0 on localhost, in machine: address='300.1.1.1': expected an address of this host",
        ),
        (
            "hosts: [{workers: 4, devices: [5]}]",
            r"conf/cluster/mine.yaml: localhost: devices=\[5\]: expected none: the host has no GPU\.",
        ),
        ("hosts: [{workers: 4, python: /no/python}]", "worker 0 on localhost, in start: it ended with status 127"),
        ("hosts: [{workers: 4, folder: /no/folder}]", "worker 0 on localhost, in start: it ended with status 125"),
        (
            "{address: 192.0.2.1, hosts: [{workers: 4}]}",
            r"192\.0\.2\.1:any port: workers cannot be awaited there: .* Set address and port in conf/cluster/mine",
        ),
    ],
)
def test_a_host_of_which_something_is_said_is_asked_though_it_is_this_one(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, text, monkeypatch, engine="deepspeed")
    assert re.match(message, found := hosts.problem(run, PROCESSOR)), found


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("generator", "plain", "train: {play_ahead: true}", "train: play_ahead with PlainGenerator=True: expected"),
        ("generator", "rows", "train: {play_ahead: true}", "train: play_ahead with RowsGenerator=True: expected"),
        ("generator", "fleet", "train: {play_ahead: true}", ""),
        ("scale", "plain", "rollout: {overlap_searches: 4}", "overlap_searches=4: expected 0 (none) with this"),
        ("scale", "rows", "rollout: {overlap_searches: 4}", ""),
    ],
)  # fmt: skip
def test_a_generator_that_cannot_play_so_is_refused_before_anything_is_taught(
    kind: str, name: str, change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "hosts: [{workers: 4}]", monkeypatch, generator=name, scale="smoke")
    path = tmp_path / "conf" / kind / f"{name if kind == 'generator' else 'smoke'}.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    ((section, values),) = yaml.safe_load(change).items()
    tree[section] = {**tree.get(section, {}), **values}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    if not message:
        preflight.check(run, lambda: PROCESSOR)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        preflight.check(run, lambda: PROCESSOR)


def test_a_host_that_no_process_is_placed_on_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = CLUSTER.replace("env, PYTHONPATH=%s", "no-such-shell, b")
    assert hosts.problem(run_of(tmp_path, text, monkeypatch, engine="zero3_8"), PROCESSOR) == ""
