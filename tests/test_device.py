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
HOLD = "import sys; from tasks import device; device.hold(sys.argv[1:]); print('held', flush=True); sys.stdin.read()"


def holding(ids: list[str], temporary: Path, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """A process that takes these devices, says so, and keeps them until its input ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
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
