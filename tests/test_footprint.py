"""Memory of processes: peaks stay, those below count, those that are left out do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import footprint
from tasks.footprint import Footprint

ROOT = Path(__file__).parents[1]
HOLD = "held = bytearray(b'x') * (%d << 20); del held; print('ready', flush=True); input()"
PARENT = f"import subprocess, sys; held = subprocess.Popen([sys.executable, '-c', {HOLD % 90!r}]); held.wait()"


def started(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready, and ends with the test."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    yield from started(HOLD % 200)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    yield from started(PARENT)


def test_what_a_process_below_has_held_counts_although_it_gave_it_back(holder: subprocess.Popen[str]) -> None:
    assert [one for one in footprint.below() if 200 <= one.rss_mb <= 260]
    assert footprint.own().rss_mb > 20
    assert not [one for one in footprint.below([holder.pid]) if 200 <= one.rss_mb <= 260]


def test_processes_of_processes_count(parent: subprocess.Popen[str]) -> None:
    assert [one for one in footprint.below() if 90 <= one.rss_mb <= 130]
    assert not [one for one in footprint.below([parent.pid]) if 90 <= one.rss_mb <= 130]
    assert len(footprint.with_below()) == 1 + len(footprint.below())


def test_a_large_process_does_not_hand_its_peak_to_what_it_starts(holder: subprocess.Popen[str]) -> None:
    """`ru_maxrss` of the inner process would be that of the outer one, which is why it is not read."""
    inner = "from tasks import footprint; print(footprint.own().rss_mb)"
    outer = (
        f"import os, sys; held = bytearray(b'x') * (300 << 20); os.execv(sys.executable, ['python', '-c', {inner!r}])"
    )
    said = subprocess.run([sys.executable, "-c", outer], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(said.stdout) < 100


def test_the_sum_and_the_largest() -> None:
    stage, workers = Footprint(100.0, 5.0), [Footprint(30.04), Footprint(50.0, 7.0)]
    assert footprint.summed(stage, []) == {"stage_mb": 100.0, "largest_gpu_mb": 5.0, "sum_gpu_mb": 5.0}
    assert footprint.summed(Footprint(100.0), workers[:1]) == {
        "stage_mb": 100.0, "largest_worker_mb": 30.0, "sum_mb": 130.0,
    }  # fmt: skip
    assert footprint.summed(stage, workers) == {
        "stage_mb": 100.0, "largest_worker_mb": 50.0, "sum_mb": 180.0, "largest_gpu_mb": 7.0, "sum_gpu_mb": 12.0,
    }  # fmt: skip
