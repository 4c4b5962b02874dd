"""Who holds a device: one process at a time, whatever clone it works in, until it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import device

ROOT = Path(__file__).parents[1]
HOLD = """
import os, sys
from tasks import device

device.join(os.environ.get("RUN") or device.run())
device.hold(sys.argv[1:])
print("held", flush=True)
sys.stdin.read()
"""


def holding(ids: list[str], temporary: Path, cwd: Path = ROOT, run: str = "") -> subprocess.Popen[str]:
    """A process that takes these devices, says so, and keeps them until its input ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "RUN": run}
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, *ids], cwd=cwd, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_second_process_waits_until_the_first_ends(tmp_path: Path, ending: str) -> None:
    first = holding(["GPU-fake-1"], tmp_path)
    assert line(first) == "held"
    second = holding(["GPU-fake-0", "GPU-fake-1"], tmp_path, cwd=tmp_path)
    told = line(second)
    assert told == f"GPU GPU-fake-1 is in use by process {first.pid} in {ROOT}: waiting until that process ends"
    time.sleep(0.5)
    assert second.poll() is None
    if ending == "kill":
        first.send_signal(signal.SIGKILL)
    first.communicate()
    assert line(second) == "held"
    second.communicate()
    assert second.returncode == 0


def test_a_run_shares_its_devices_with_its_workers(tmp_path: Path) -> None:
    processes = [holding(["GPU-fake-1"], tmp_path, run="mine") for _ in range(3)]
    assert [line(process) for process in processes] == ["held"] * 3
    other = holding(["GPU-fake-1"], tmp_path, run="another")
    assert "GPU GPU-fake-1 is in use by process " in line(other)
    for process in processes:
        process.communicate()
    assert line(other) == "held"
    other.communicate()


@pytest.mark.parametrize(
    ("visible", "number", "count", "expected"),
    [
        ("", 0, 1, "0"),
        ("", 3, 1, "3"),
        ("", 5, 1, "1"),
        ("", 1, 2, "2,3"),
        ("6", 1, 1, "6"),
        ("4,7", 1, 1, "7"),
        ("GPU-a,GPU-b", 2, 1, "GPU-a"),
        ("4,7", 0, 4, "4,7"),
    ],
)
def test_workers_of_a_host_take_its_gpus_in_turn(
    visible: str, number: int, count: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device.take_turn(number, count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_without_gpus_there_are_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device.take_turn(1)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_other_devices_are_free(tmp_path: Path) -> None:
    first, second = holding(["GPU-fake-1"], tmp_path), holding(["MIG-fake/2", "MIG-fake/2"], tmp_path)
    assert line(first) == line(second) == "held"
    for process in (first, second):
        process.communicate()


def test_a_process_that_asks_again_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(device, "_held", {})
    messages: list[str] = []
    for ids in (["GPU-a"], ["GPU-b", "GPU-a"], []):
        device.hold(ids, messages.append)
    assert not messages
    assert sorted(device._held) == ["GPU-a", "GPU-b"]
    for lock in device._held.values():
        lock.release()


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    monkeypatch.setattr(device, "_held", {})
    with pytest.raises(ValueError, match=r"cannot be made .*set TMPDIR"):
        device.hold(["GPU-a"])
