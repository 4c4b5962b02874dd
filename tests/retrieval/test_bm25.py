"""BM25: against a slow implementation of the formula, and the properties every caller relies on."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import conf, retrieval, store
from tasks.retrieval import bm25
from tasks.retrieval.bm25 import Settings
from tests.papers import golden

_STOP_TEXT = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
    "this to was will with"
)
STOP = frozenset(_STOP_TEXT.split())

STEMS = {
    "running": "run", "runs": "run", "runners": "runner", "mountains": "mountain", "city": "citi", "equal": "equal",
    "words": "word", "capital": "capit", "missing": "miss", "largest": "largest", "switzerland": "switzerland",
}  # fmt: skip
"""What the published English Snowball algorithm makes of these words; it leaves the rest of the towns as they are."""


def slow_bm25(passages: list[tuple[str, str]], query: str, config: Settings) -> list[float]:
    """One score a passage, in double precision, straight from the formula."""
    documents = [_terms((title + " ") * config.title_weight + text, config) for title, text in passages]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for term in _terms(query, config):
            containing = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            saturation = config.k1 * (1 - config.b + config.b * len(document) / mean_length)
            score += idf * counts[term] / (counts[term] + saturation) if counts[term] else 0.0
        scores.append(score)
    return scores


def _terms(text: str, config: Settings) -> list[str]:
    words = [word for word in re.findall(r"\w+", text.lower()) if len(word) > 1]
    kept = [word for word in words if config.stopwords == "none" or word not in STOP]
    if config.stemmer == "none":
        return kept
    return [STEMS.get(word, word) for word in kept]


def _open(corpus: Path, config: Settings) -> retrieval.Retriever:
    retrieval.build(corpus, corpus.parent / "index", config)
    return retrieval.open_retriever(corpus.parent / "index", corpus)


QUERIES = [
    "city of Switzerland",
    "the river river",
    "runners running",
    "mountains",
    "Zürich BERN",
    "首都 である 東京",
    "nowhere",
]


@pytest.mark.parametrize(
    "config",
    [
        Settings("bm25"),
        Settings("bm25", stopwords="none", k1=0.9, b=0.4),
        Settings("bm25", title_weight=3, b=0.0),
        Settings("bm25", title_weight=0, k1=0.0),
    ],
)
def test_scores_follow_the_formula(corpus, town_passages, config):
    retriever = _open(corpus(town_passages), config)
    for query, hits in zip(QUERIES, retriever.search(QUERIES, 10), strict=True):
        expected = slow_bm25(town_passages, query, config)
        for hit in hits:
            assert hit.score == pytest.approx(expected[int(hit.passage_id[1:])], abs=1e-5)
        # Ranking: by exact score where scores differ by more than float32 can show.
        ranked = [expected[int(hit.passage_id[1:])] for hit in hits]
        assert all(a >= b - 1e-5 for a, b in itertools.pairwise(ranked))


def test_stemming(corpus, town_passages):
    config = Settings("bm25", stemmer="snowball")
    retriever = _open(corpus(town_passages), config)
    queries = ["runs", "mountain", "cities city", "a runner runs", "wording"]
    as_stems = ["run", "mountain", "citi citi", "runner run", "word"]
    for query, hits in zip(as_stems, retriever.search(queries, 10), strict=True):
        expected = slow_bm25(town_passages, query, config)
        assert [hit.score for hit in hits] == pytest.approx([expected[int(h.passage_id[1:])] for h in hits], abs=1e-5)
        assert hits[0].score > 0


@pytest.mark.parametrize("row", golden("search", "BM25 scores"))
def test_golden_scores(corpus, row):
    """Two passages of 3 and 1 terms; "apple" is in one of them, twice."""
    retriever = _open(corpus([("", "apple apple pear"), ("", "plum")]), Settings("bm25"))
    (hits,) = retriever.search([row["query"]], 2)
    assert [hit.passage_id for hit in hits] == ["p0", "p1"]
    assert [hit.score for hit in hits] == pytest.approx(row["scores"], abs=1e-6)


def test_title_weight_lifts_a_title_match(corpus):
    passages = [("Notes", "ferry ferry ferry"), ("Ferry", "boats and harbours and tides")]
    flat = _open(corpus(passages), Settings("bm25", title_weight=1)).search(["ferry"], 2)[0]
    heavy = _open(corpus(passages), Settings("bm25", title_weight=8)).search(["ferry"], 2)[0]
    none = _open(corpus(passages), Settings("bm25", title_weight=0)).search(["ferry"], 2)[0]
    assert [hit.passage_id for hit in flat] == ["p0", "p1"]
    assert [hit.passage_id for hit in heavy] == ["p1", "p0"]
    assert none[1].score == 0.0


def test_hits_carry_the_passages_unchanged(corpus, town_passages):
    retriever = _open(corpus(town_passages), Settings("bm25"))
    for hit in retriever.search(["city"], 100)[0]:
        assert (hit.title, hit.text) == town_passages[int(hit.passage_id[1:])]


def test_unicode_composed_and_decomposed_are_one_word(corpus, town_passages):
    retriever = _open(corpus(town_passages), Settings("bm25"))
    composed, decomposed = retriever.search(["ZÜRICH", "Zu\u0308rich"], 2)
    assert composed == decomposed
    assert composed[0].passage_id == "p0"
    assert retriever.search(["東京"], 1)[0][0].passage_id == "p6"
    assert len(retriever.search(["\ud800 \x00 🚢"], 1)[0]) == 1


def test_equal_scores_come_in_corpus_order(corpus):
    passages = [("", "same words here") for _ in range(60)] + [("", "same words here best")]
    retriever = _open(corpus(passages), Settings("bm25"))
    assert [hit.passage_id for hit in retriever.search(["words best"], 4)[0]] == ["p60", "p0", "p1", "p2"]
    assert [hit.passage_id for hit in retriever.search(["same"], 61)[0]] == [f"p{i}" for i in range(61)]


def test_queries_without_a_known_term_get_the_first_passages(corpus, town_passages):
    retriever = _open(corpus(town_passages), Settings("bm25"))
    for hits in retriever.search(["", "the", "?!", "unheardof"], 3):
        assert [(hit.passage_id, hit.score) for hit in hits] == [("p0", 0.0), ("p1", 0.0), ("p2", 0.0)]


def test_bounds(corpus, town_passages):
    retriever = _open(corpus(town_passages), Settings("bm25"))
    assert retriever.search([], 3) == []
    assert len(retriever.search(["city"], 10_000)[0]) == len(town_passages)
    with pytest.raises(ValueError, match="top_k=0: expected at least 1"):
        retriever.search(["city"], 0)
    with pytest.raises(ValueError, match=r"queries\[1\]: found NoneType, expected text"):
        retriever.search(["city", None], 1)  # type: ignore[list-item]
    assert len(retriever.search(["word " * 10_000], 1)[0]) == 1


def test_corpus_without_a_single_term(corpus):
    retriever = _open(corpus([("", "the a"), ("", "?")]), Settings("bm25"))
    assert [hit.passage_id for hit in retriever.search(["the"], 5)[0]] == ["p0", "p1"]


def test_scores_are_those_of_bm25s_to_the_bit(corpus):
    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(60)]
    path = corpus([("", " ".join(rng.choice(words, size=rng.integers(1, 30)))) for _ in range(500)])
    retriever = _open(path, Settings("bm25"))
    index = bm25s.BM25.load(path.parent / "index", show_progress=False, backend="numpy")
    queries = [" ".join(rng.choice(words, size=size)) for size in (1, 2, 5, 20)]
    expected = index.retrieve([query.split() for query in queries], k=200, show_progress=False).scores
    found = [[hit.score for hit in hits] for hits in retriever.search(queries, 200)]
    assert (np.array(found, dtype=np.float32) == expected).all()


def test_threads_change_nothing(corpus, town_passages):
    path = corpus(town_passages)
    retrieval.build(path, path.parent / "index", Settings("bm25"))
    one, *others = (retrieval.open_retriever(path.parent / "index", num_threads=n) for n in (1, 2, 3, 16))
    for other in others:
        assert other.search(["", *QUERIES], 4) == one.search(["", *QUERIES], 4)


def test_two_builds_are_the_same_bytes(corpus, town_passages):
    path = corpus(town_passages)
    folders = [path.parent / name for name in ("one", "two")]
    for folder in folders:
        retrieval.build(path, folder, Settings("bm25", stemmer="snowball"))
    one, two = ({p.name: store.sha256(p) for p in folder.iterdir()} for folder in folders)
    assert one == two


WORDS = st.sampled_from(["ash", "birch", "cedar", "date", "elm", "fir", "the", "Zürich"])
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    passages=st.lists(st.tuples(TEXTS, TEXTS.map(lambda text: text + " .")), min_size=1, max_size=40),
    queries=st.lists(st.one_of(TEXTS, st.text(max_size=20)), min_size=1, max_size=6),
    top_k=st.integers(1, 50),
)
def test_properties(corpus, passages, queries, top_k):
    retriever = _open(corpus(passages), Settings("bm25"))
    batch = retriever.search(queries, top_k)
    assert batch == [retriever.search([query], top_k)[0] for query in queries]
    assert batch == retriever.search(queries, top_k)
    full = retriever.search(queries, len(passages))
    for query, hits, everything in zip(queries, batch, full, strict=True):
        rows = [int(hit.passage_id[1:]) for hit in hits]
        assert len(set(rows)) == len(hits) == min(top_k, len(passages))
        assert set(rows) <= set(range(len(passages)))
        keys = [(-hit.score, row) for hit, row in zip(hits, rows, strict=True)]
        assert keys == sorted(keys)
        assert hits == everything[: len(hits)]
        expected = np.array(slow_bm25(passages, query, Settings("bm25"))) if any(map(_indexed, passages)) else None
        if expected is not None:
            assert [hit.score for hit in hits] == pytest.approx(sorted(expected, reverse=True)[: len(hits)], abs=1e-5)


def _indexed(passage: tuple[str, str]) -> bool:
    return bool(_terms(" ".join(passage), Settings("bm25")))


def test_settings_out_of_bounds():
    tree = {"backend": "bm25", "b": 1.5}
    with pytest.raises(ValueError, match=r"here: b=1.5: expected 0 or more and 1 or less"):
        conf.fill(Settings, tree, "here")
    with pytest.raises(ValueError, match="found 'porter'"):
        conf.fill(Settings, {"backend": "bm25", "stemmer": "porter"}, "here")


def test_the_stop_words_are_the_ones_documented():
    analyzer = bm25.Analyzer(Settings("bm25"))
    assert [word for word in sorted(STOP) if analyzer.term(word) is not None] == []
    assert analyzer.terms("which who") == ["which", "who"]


@pytest.mark.parametrize("query", ["zzz", "", "the of and", "\U0001f600", "zzz the"])
def test_a_query_of_unknown_words_finds_the_first_passages_with_score_0(query, corpus, town_passages, tmp_path):
    """As many as were asked for, in the order of the corpus: no word of it stands in any passage."""
    retrieval.build(corpus(town_passages), tmp_path / "index", Settings("bm25"))
    (hits,) = retrieval.open_retriever(tmp_path / "index").search([query], 3)
    assert [hit.score for hit in hits] == [0.0] * 3
    assert [hit.title for hit in hits] == [title for title, _ in town_passages[:3]]
