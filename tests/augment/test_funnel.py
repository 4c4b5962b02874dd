"""What stays and what is counted: against a second, slow implementation, and on retrievers that answer as told."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.augment import Rejection, Written
from tasks.augment.funnel import augment
from tasks.augment.records import HOPS, REJECTED, read_hops
from tasks.augment.settings import AugmentConf
from tasks.augment.sources import Source, is_lexical, majority
from tasks.conf import fill
from tasks.retrieval import RetrievalError, bm25, dense, elasticsearch, hybrid
from tasks.store import read_jsonl
from tasks.text import normalize
from tasks.types import Hit, Hop, Question

FOUND = Hit("p1", 1.0, "Bern", "A city.")


class Told:
    """A retriever that finds something for these queries only; counts its searches."""

    def __init__(self, found: Iterable[str], hit: Hit = FOUND) -> None:
        self.found, self.hit, self.batches = set(found), hit, Counter[int]()

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        self.batches[len(queries)] += 1
        nothing = Hit("p9", 0.0, "", "Nothing.")
        return [[self.hit if query in self.found else nothing] * top_k for query in queries]


class Given:
    """A writer that has its hops already, or rejects."""

    def __init__(self, hops: dict[str, tuple[Hop, ...] | Rejection]) -> None:
        self.hops = hops

    def write(self, questions: Iterable[Question]) -> Generator[Written, None, None]:
        for question in questions:
            found = self.hops[question.id]
            rejected = isinstance(found, Rejection)
            yield Written(question, () if rejected else found, found if rejected else None, 7)  # type: ignore[arg-type]


def question(name: str, num_hops: int = 1) -> Question:
    hops = tuple(Hop(f"hop {i}", "Bern") for i in range(num_hops))
    return Question(name, "d", "train", "Where?", ("Bern",), max(1, num_hops), decomposition=hops)


def conf(num_sources: int, **changes: Any) -> AugmentConf:
    names = tuple(f"s{i}" for i in range(num_sources))
    values: dict[str, Any] = {"num_queries": 3, "top_k": 2, "validity": "nonempty"} | changes
    return AugmentConf("rules", ("train",), sources=names, **values)


def run(
    out: Path, questions: list[Question], hops: dict[str, Any], found: list[set[str]], **changes: Any
) -> tuple[dict[str, Any], dict[str, tuple[Hop, ...]], list[dict[str, Any]]]:
    sources = [Source(f"s{i}", Told(one), is_lexical=True) for i, one in enumerate(found)]
    counts = augment(questions, Given(hops), sources, conf(len(found), **changes), out)
    return counts, read_hops(out / HOPS), [row for _, row in read_jsonl(out / REJECTED)]


def test_every_step_by_hand(tmp_path: Path) -> None:
    hops = {
        "a": (
            Hop("Where?", "Basel", "p1", ("one", " ", "ONE!", "two", "three", "four")),
            Hop("And?", "Bern", None, ("five",)),
        ),
        "b": Rejection("write", "not_json", "found x"),
        "c": (Hop("Where?", "Basel", None, ("one",)),),
    }
    questions = [question("a", 2), question("b"), question("c"), question("d", 0)]
    counts, kept, rejected = run(tmp_path, questions, hops, [{"one", "two"}, {"two"}, {"one", "three"}])
    assert kept == {"a": (Hop("Where?", "Basel", "p1", ("one", "two")), Hop("And?", "Bern", None, ()))}
    assert [(row["question_id"], row["hop"], row["query"], row["stage"], row["reason"]) for row in rejected] == [
        ("a", 1, " ", "query", "blank"),
        ("a", 1, "ONE!", "query", "duplicate"),
        ("a", 1, "four", "query", "surplus"),
        ("a", 1, "three", "search", "too_few_sources"),
        ("a", 2, "five", "search", "too_few_sources"),
        ("b", None, None, "write", "not_json"),
        ("c", 1, None, "coherence", "final_answer"),
    ]
    assert rejected[3]["detail"] == "valid in 1 of 3 sources (s2), expected 2"
    assert counts == {
        "questions": {
            "read": 4, "without_decomposition": 1, "written": 2, "kept": 1,
            "rejected": {"final_answer": 1, "not_json": 1},
        },
        "hops": {"kept": 2, "without_query": 1},
        "queries": {
            "written": 7, "blank": 1, "duplicate": 1, "surplus": 1, "checked": 4, "too_few_sources": 2, "kept": 2,
            "valid": {"s0": 2, "s1": 1, "s2": 2}, "mean_a_hop": 1.0,
        },
        "writer_tokens": 21,
    }  # fmt: skip


def slow_rule(queries: list[str], found: list[set[str]], most: int) -> list[str]:
    """The rule of the paper in other words: at least half of the sources, each query once, the first `most`."""
    seen: list[str] = []
    for query in queries:
        if normalize(query) and all(normalize(query) != normalize(one) for one in seen):
            seen.append(query)
    return [query for query in seen[:most] if 2 * [query in one for one in found].count(True) >= len(found)]


WORDS = st.sampled_from(["red", "Red", "the red", "blue", "green", "pink", "grey", "the"])


@given(
    st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=4),
    st.lists(st.sets(WORDS), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_the_rule_twice(
    tmp_path_factory: pytest.TempPathFactory, hops: list[list[str]], found: list[set[str]], most: int, batch: int
) -> None:
    usable = [[*queries, "red"] for queries in hops]  # A hop without any is no coherent one.
    questions = [question(f"q{i}") for i in range(len(usable))]
    written = {f"q{i}": (Hop("Where?", "Bern", None, tuple(queries)),) for i, queries in enumerate(usable)}
    out = tmp_path_factory.mktemp("out")
    counts, kept, rejected = run(out, questions, written, found, num_queries=most, batch_size=batch)
    assert [list(hops[0].queries) for hops in kept.values()] == [slow_rule(one, found, most) for one in usable]
    queries = counts["queries"]
    assert queries["written"] == sum(map(len, usable)) == queries["kept"] + len(rejected)
    assert queries["checked"] == queries["kept"] + queries["too_few_sources"]
    assert queries["written"] == sum(queries[name] for name in ("blank", "duplicate", "surplus", "checked"))
    assert counts["hops"]["without_query"] == sum(not hops[0].queries for hops in kept.values())


@given(st.integers(1, 1000))
def test_the_majority_is_half_rounded_up(num_sources: int) -> None:
    assert majority(num_sources) == math.ceil(num_sources / 2)


def test_batches_change_nothing_but_the_number_of_searches(tmp_path: Path) -> None:
    questions = [question(f"q{i}") for i in range(10)]
    hops = {f"q{i}": (Hop("Where?", "Bern", None, (f"query {i}", "both")),) for i in range(10)}
    made = []
    for size in (1, 3, 100):
        told = Told(["both", "query 3"])
        sources = [Source("s0", told, is_lexical=True)]
        out = tmp_path / str(size)
        counts = augment(questions, Given(hops), sources, conf(1, batch_size=size), out)
        made.append((counts, (out / HOPS).read_bytes(), (out / REJECTED).read_bytes()))
        assert told.batches == {1: {2: 10}, 3: {6: 3, 2: 1}, 100: {20: 1}}[size]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("hit", "lexical", "nonempty", "answer"),
    [
        (Hit("p1", 0.5, "x", "y"), True, True, True),
        (Hit("p2", 0.0, "x", "y"), True, False, False),
        (Hit("p2", -0.5, "x", "y"), False, True, False),
        (Hit("p2", 0.5, "The Old Town", "y"), True, True, True),
        (Hit("p2", 0.5, "The Old", "town hall"), True, True, True),
        (Hit("p2", 0.5, "The Old Townhall", ""), True, True, False),
    ],
)
def test_what_a_valid_result_is(hit: Hit, lexical: bool, nonempty: bool, answer: bool) -> None:
    from tasks.augment.sources import Probe

    source = Source("s", Told(["q"], hit), is_lexical=lexical)
    probe = Probe("q", Hop("Where?", "old town", "p1"))
    assert source.valid([probe], 1, "nonempty") == [nonempty]
    assert source.valid([probe], 1, "answer") == [answer]


def test_which_retrievers_rank_by_words() -> None:
    assert is_lexical(bm25.Settings("bm25"))
    assert is_lexical(elasticsearch.Settings("elasticsearch"))
    assert not is_lexical(dense.Settings("dense"))
    assert not is_lexical(hybrid.Settings("hybrid", parts={"a": {"backend": "bm25"}, "b": {"backend": "dense"}}))


def test_a_search_that_fails_is_no_invalid_query_and_leaves_no_file(tmp_path: Path) -> None:
    class Down:
        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            raise RetrievalError("down")

    hops = {"a": (Hop("Where?", "Bern", None, ("one",)),)}
    sources = [Source("s0", Told(["one"]), True), Source("s1", Down(), True)]
    with pytest.raises(RetrievalError, match="down"):
        augment([question("a")], Given(hops), sources, conf(2), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_decomposed_is_nothing_written(tmp_path: Path) -> None:
    counts, kept, rejected = run(tmp_path, [question("a", 0), question("b", 0)], {}, [{"x"}])
    assert (kept, rejected) == ({}, [])
    assert counts["questions"] == {"read": 2, "without_decomposition": 2, "written": 0, "kept": 0, "rejected": {}}
    assert counts["queries"]["mean_a_hop"] == 0.0
    assert json.loads(json.dumps(counts)) == counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "sources=(): expected at least one name"),
        ({"sources": ("a", "a")}, "none twice"),
        ({"splits": ()}, "splits=()"),
        ({"num_queries": 0}, "num_queries=0: expected a number above 0"),
        ({"top_k": 0}, "top_k=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"writer": "openai"}, "chat=None: expected a value with writer: openai"),
    ],
)
def test_settings_out_of_bounds(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "writer": "rules", "splits": ("train",), "num_queries": 3, "sources": ("index",), "top_k": 3,
        "validity": "nonempty",
    }  # fmt: skip
    with pytest.raises(ValueError) as caught:
        fill(AugmentConf, values | changes, "here")
    assert message in str(caught.value)
