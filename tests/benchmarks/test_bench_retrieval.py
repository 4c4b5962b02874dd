"""The arithmetic of the retrieval benchmarks, and both at their smallest size (in full: `make bench-retrieval`)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from tasks.types import Hit
from tests.benchmarks import bench_retrieval
from tests.benchmarks.bench_retrieval import Compared, compare, table
from tests.benchmarks.scale_retrieval import ROOT, WordSums

MET = Compared("flat", ours=1.09, raw=1.0, different=0.0)


def test_the_limits():
    assert table([MET], 100)[1]
    assert "| flat | 10.900 | 10.000 | +9.0% | 0.00% | met |" in table([MET], 100)[0]
    slow, wrong = dataclasses.replace(MET, ours=1.11), dataclasses.replace(MET, different=0.03)
    assert not table([MET, slow], 100)[1]
    assert not table([MET, wrong], 100)[1]


def test_scores_that_differ_are_counted():
    def side(score):
        return lambda queries: [[Hit("a", 1.0, "", ""), Hit("b", score, "", "")] for _ in queries]

    queries = [f"q{number}" for number in range(100)]
    assert compare("same", side(0.5), side(0.5), queries, 1).different == 0.0
    assert compare("half", side(0.5), side(0.4), queries, 1).different == 0.5


def test_the_stand_in_encoder_repeats_and_ignores_order():
    one, two, empty = WordSums().encode(["red ferry", "ferry RED!", ""], 1)
    assert np.allclose(one, two, atol=1e-6)
    assert np.allclose(np.linalg.norm([one, empty], axis=1), 1, atol=1e-6)
    assert (WordSums().encode(["red ferry"], 1)[0] == one).all()


@pytest.mark.slow
def test_the_overhead_is_measured(monkeypatch, capsys):
    words = "--passages 1000 --queries 16 --repeats 1 --types flat,ivf_sq8"
    monkeypatch.setattr(sys, "argv", ["bench_retrieval", *words.split()])
    with pytest.raises(SystemExit) as ended:
        bench_retrieval.main()
    assert ended.value.code in (0, 1)  # So few queries are no measurement.
    printed = capsys.readouterr().out
    for engine in ("bm25 (bm25s)", "dense flat (FAISS)", "dense ivf_sq8 (FAISS)"):
        assert f"| {engine} |" in printed
    assert printed.count("| 0.00% |") == 3, printed  # Both sides find the same.


@pytest.mark.slow
def test_every_step_of_the_scale_benchmark_runs(tmp_path):
    words = ["--passages", "300", "--types", "flat,sq8", "--no-kill", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.scale_retrieval", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("corpus", "bm25 search", "flat search", "sq8 build, no encoding"):
        assert step in done.stdout
