"""The curriculum of noise by hand, its bounds, and what it does to the documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.retrieval.generated import GeneratedRetriever
from tasks.retrieval.writers import WorldWriter
from tasks.rl.search.index import IndexSearch
from tasks.rl.search.simulated import SimulatedSearch
from tests.papers import golden


@pytest.mark.parametrize("row", golden("zerosearch", "Noise"))
def test_golden_noise(row: dict[str, Any]) -> None:
    """Falling noise and a straight line (base 1) are allowed."""
    found = SimulatedSearch(row["start"], row["end"], row["base"]).noise(row["done"])
    assert found == pytest.approx(row["share"], abs=1e-6)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_between_its_ends_and_monotone(start: float, end: float, base: float, one: float, other: float) -> None:
    simulator = SimulatedSearch(start, end, base)
    early, late = (simulator.noise(done) for done in sorted((one, other)))
    assert min(start, end) - 1e-9 <= early <= max(start, end) + 1e-9
    assert (late - early) * (end - start) >= -1e-9
    assert simulator.noise(0) == pytest.approx(start)
    assert simulator.noise(1) == pytest.approx(end)


def test_a_curve_of_nearly_one_is_nearly_straight() -> None:
    assert SimulatedSearch(0.0, 1.0, 1.0001).noise(0.3) == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize("change", [{"noise_start": -0.1}, {"noise_end": 1.1}, {"base": 0.5}])
def test_bounds(change: dict[str, float]) -> None:
    fine: dict[str, Any] = {"noise_start": 0.0, "noise_end": 0.5, "base": 4.0}
    with pytest.raises(ValueError, match=next(iter(change))):
        SimulatedSearch(**(fine | change))


PASSAGES = [(f"Town{i}", f"Town{i} lies at the river{i} .") for i in range(9)] + [("King", "King rules .")]


def test_the_simulator_is_told_noise_and_seed_and_the_index_nothing() -> None:
    class Engine:
        def search(self, queries: list[str], top_k: int) -> list[list[Any]]:
            raise AssertionError

        def announce(self, noise: float, seed: str) -> None:
            told.append((noise, seed))

    told: list[tuple[float, str]] = []
    index, simulator = Engine(), Engine()
    curriculum = SimulatedSearch(0.0, 0.5, 1.0)
    assert curriculum.retriever(index, {"documents": simulator}) is simulator
    curriculum.announce({"documents": simulator}, 0.5, "0/7")
    assert told == [(0.25, "0/7")]
    assert IndexSearch().retriever(index, {}) is index
    IndexSearch().announce({}, 0.5, "0/8")
    assert told == [(0.25, "0/7")]


def test_noise_is_the_share_of_false_leading_documents() -> None:
    """Every query names its town: useful documents tell its own facts, noisy ones another town's under its name."""
    queries = [f"where does Town{i % 9} lie {i}" for i in range(600)]
    for noise in (0.0, 0.3, 1.0):
        found = GeneratedRetriever(WorldWriter(PASSAGES), noise, "seed").search(queries, 2)
        assert all(hits[0].title == f"Town{i % 9}" for i, hits in enumerate(found))
        wrong = sum(hits[0].text != PASSAGES[i % 9][1] for i, hits in enumerate(found)) / 600
        # One other town of nine may be drawn itself; five deviations of 600 draws are 0.1.
        assert wrong == pytest.approx(noise * 8 / 9, abs=0.1 if 0 < noise < 1 else 0.07 * noise)
        assert all("rules" not in hits[0].text for hits in found)  # a fact of the same kind


def test_one_seed_one_answer() -> None:
    def search(seed: str, noise: float = 0.5) -> Any:
        return GeneratedRetriever(WorldWriter(PASSAGES), noise, seed).search([f"Town{i}" for i in range(9)], 3)

    assert search("a") == search("a")
    assert search("a") != search("b")
    assert GeneratedRetriever(WorldWriter(PASSAGES), 0.5, "a").search(["Town3"], 3) == [search("a")[3]]


def test_what_names_nothing_gets_other_passages() -> None:
    (hits,) = GeneratedRetriever(WorldWriter(PASSAGES), 0.0, "a").search(["who are you"], 3)
    assert {(hit.title, hit.text) for hit in hits} <= set(PASSAGES)
    with pytest.raises(ValueError, match="needs its passages"):
        WorldWriter([])
