"""Benchmarks of play that does not wait, one step off and predicted seconds run to their tables, at their smallest."""

from __future__ import annotations

import sys

import pytest

from tasks.engine import deepspeed
from tests.benchmarks import bench_ahead, bench_overlap, bench_scaling


def test_searches_overlap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"QUESTIONS": 4, "COPIES": 2, "ROWS": 8, "SHORTEST_S": 0.001, "LONGEST_S": 0.01, "LIMIT": 1000.0}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_overlap, name, size)
    monkeypatch.setattr(sys, "argv", ["bench_overlap"])
    assert bench_overlap.main() == 0
    assert "worst ratio" in capsys.readouterr().out
    monkeypatch.setattr(bench_overlap, "LIMIT", 0.0)
    assert bench_overlap.main() == 1


@pytest.mark.usefixtures("forked_workers")
def test_a_step_is_played_while_another_is_learned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in {"STEPS": 2, "QUESTIONS": 2, "COPIES": 2, "WIDTH": 32, "LAYERS": 1, "LIMIT": 0.0}.items():
        monkeypatch.setattr(bench_ahead, name, size)
    for name, size in {"SHORTEST_S": 0.001, "LONGEST_S": 0.01}.items():
        monkeypatch.setattr(bench_overlap, name, size)
    monkeypatch.setattr(sys, "argv", ["bench_ahead"])
    assert bench_ahead.main() == 1
    printed = capsys.readouterr().out
    assert "| 2 |" in printed
    assert "worst ratio" in printed


@pytest.mark.usefixtures("forked_workers")
def test_seconds_are_predicted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"ROWS": 8, "TOKENS": 16, "EXCHANGED": 2**12, "WIDTH": 48, "LAYERS": 1, "LIMIT": -1.0, "ROUNDS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_scaling, name, size)
    monkeypatch.setattr(deepspeed, "_MODULE", deepspeed._MODULE)  # Put back at the end.
    monkeypatch.setattr(sys, "argv", ["bench_scaling"])
    with pytest.raises(SystemExit, match="a prediction is off by"):
        bench_scaling.main()
    printed = capsys.readouterr().out
    assert "| 1 | learn |" in printed
    assert "| 2 | logprobs |" in printed
