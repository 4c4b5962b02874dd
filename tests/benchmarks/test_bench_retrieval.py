"""The arithmetic of the retrieval benchmark and the stand-in encoder; the benchmark runs by `make bench-retrieval`."""

from __future__ import annotations

import dataclasses

import numpy as np

from tasks.types import Hit
from tests.benchmarks.bench_retrieval import Compared, compare, table
from tests.benchmarks.scale_retrieval import WordSums

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
