"""The server benchmark's loads and verdicts, and itself at its smallest size (in full: `make bench-retrieval`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.bench_server import LOADS, ROOT, SPEEDUP, WINDOW, Measured, growth, stream, table


def _queries(kind: str, count: int) -> list[str]:
    bodies = stream(kind, lambda rng: str(rng.random()), 3, count)
    return [query for body in bodies for query in json.loads(body)["queries"]]


def test_loads() -> None:
    assert max(Counter(_queries("unique", 1000)).values()) == 1
    assert _queries("unique", 50) == _queries("unique", 50)
    rollouts = _queries("rollouts", 3 * WINDOW)
    assert Counter(Counter(rollouts).values()) == {4: 3 * WINDOW // 5, 1: 3 * WINDOW // 5}
    for start in range(0, 3 * WINDOW, WINDOW):  # The rollouts of a question are near each other.
        assert not set(rollouts[start : start + WINDOW]) & set(rollouts[start + WINDOW :])
    assert Counter(Counter(_queries("turns", 3)).values()) == {4: 3 * WINDOW // 5, 1: 3 * WINDOW // 5}


def _found(ours: float, errors: int = 0) -> dict[tuple[str, str, int], Measured]:
    found = {}
    for kind in LOADS["bm25"]:
        found["ours", kind, 32] = Measured(ours, 0.001, 0.002, errors, 100)
        found["peer", kind, 32] = Measured(100.0, 0.001, 0.002, 0, 100)
    return found


def test_verdicts() -> None:
    assert table("bm25", _found(100 * SPEEDUP), [32])[1]
    text, met = table("bm25", _found(100 * SPEEDUP - 1), [32])
    assert not met
    assert "NOT MET" in text
    assert not table("bm25", _found(100 * SPEEDUP, errors=1), [32])[1]


def test_growth() -> None:
    assert growth([(s / 2, 50.0) for s in range(100)]) == (0.0, 0.0)
    warm_up = [(s / 2, min(s, 10.0)) for s in range(100)]  # Ends before the second fifth.
    assert growth(warm_up) == (0.0, 0.0)
    slope, grown = growth([(float(s), 2.0 * s) for s in range(600)])
    assert slope == 120.0
    assert grown == 720.0


@pytest.mark.slow
@pytest.mark.servers
def test_it_runs_to_its_verdict(tmp_path: Path) -> None:
    size = "--clients 2 --seconds 0.2 --processes-seconds 0.2 --memory-minutes 0.02"
    command = [sys.executable, "-m", "tests.benchmarks.bench_server", *size.split()]
    command += ["--backends", "bm25"]  # An encoder would take twice as long.
    command += ["--folder", str(tmp_path), "--corpus", str(tmp_path / "none.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr  # Only 32 clients are held to a limit.
    for kind in LOADS["bm25"]:
        assert f"| bm25, {kind} | 2 |" in done.stdout
    assert "0 errors" in done.stdout
    assert re.search(
        r"bm25, unique, 32 clients: 1 process \d+ .*; 2 processes \d+, .*; ratio [\d.]+; 0 errors", done.stdout
    )
