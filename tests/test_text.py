"""Answer normalisation and string scores against the golden table and a second implementation."""

import unicodedata
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.text import exact_match, f1, normalize, substring_match
from tests.papers import golden

GOLDEN = golden("search_r1", "String scores")
ASCII_PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

# Words that meet each other often, and the characters on which normalisation decides.
words = st.sampled_from(
    ["The", "the", "a", "A.", "an", "theory", "york", "York", "new", "U.S.A.", "-", "'s", "é", "İ", "ß", "_a_", "1"]
)
texts = st.one_of(st.lists(words, max_size=8).map(" ".join), st.text(max_size=20))
gold_lists = st.lists(texts, max_size=4)
many = settings(max_examples=300)


def slow_normalize(text: str) -> str:
    """Character by character, without regular expressions."""
    kept = [c for c in unicodedata.normalize("NFC", text).lower() if c not in ASCII_PUNCTUATION]
    runs = ["".join(run) for _, run in groupby(kept, key=str.isalnum)]
    return " ".join("".join(" " if run in ("a", "an", "the") else run for run in runs).split())


def slow_f1(prediction: str, gold: str) -> float:
    """Cross out each shared word once."""
    left, right = slow_normalize(prediction).split(), slow_normalize(gold).split()
    rest, common = list(right), 0
    for word in left:
        if word in rest:
            rest.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["answer"])
def test_golden_table(row):
    answer, golds = row["answer"], row["golds"].split("; ")
    assert normalize(answer) == row["normalised"]
    assert exact_match(answer, golds) == row["EM"]
    assert substring_match(answer, golds) == row["subEM"]
    assert f1(answer, golds) == pytest.approx(row["F1"], abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("york york", "york york", 1.0),  # the set-over-multiset rule would say 0.5
        ("York", "york york", 2 / 3),  # the set rule would say 1.0
        ("york york", "york", 2 / 3),
        ("a b a", "a b", 1.0),  # articles are gone before counting
        ("b c d", "b x", 0.4),  # 2 * 1 / (3 + 2), not rounded
    ],
)
def test_f1_counts_repeated_words(prediction, gold, expected):
    assert f1(prediction, [gold]) == pytest.approx(expected, abs=1e-12)


def test_f1_is_not_rounded():
    assert f1("york", ["york york"]) == 2 / 3


def test_order_of_normalisation():
    assert normalize("U.S.A.") == "usa"
    assert normalize("A.N. Other") == "other"  # punctuation first: "a.n." becomes the article "an"
    assert normalize("the-atre a_b") == "theatre ab"
    assert normalize(" \t The\n\u00a0A an ") == ""


@pytest.mark.parametrize("score", [exact_match, substring_match, f1])
def test_golds_that_normalise_to_nothing_never_match(score):
    for prediction in ("", "The", "Paris", "!?"):
        assert score(prediction, ["The", "", "..."]) == 0.0
        assert score(prediction, []) == 0.0
    assert score("Paris", ["The", "Paris"]) == 1.0


@pytest.mark.parametrize("score", [exact_match, substring_match, f1])
def test_no_answer_scores_zero(score):
    assert score(None, ["Paris", "None"]) == 0.0


@many
@given(texts)
def test_normalisation_agrees_with_the_slow_one_and_is_stable(text):
    assert normalize(text) == slow_normalize(text)
    assert normalize(f"  {text.upper()}  ".upper()) == normalize(text.upper())


@many
@given(texts, gold_lists)
def test_scores_agree_with_the_slow_ones(prediction, golds):
    usable = [gold for gold in golds if slow_normalize(gold)]
    own = slow_normalize(prediction)
    assert exact_match(prediction, golds) == float(own in [slow_normalize(g) for g in usable])
    assert substring_match(prediction, golds) == float(any(own.find(slow_normalize(g)) >= 0 for g in usable))
    assert f1(prediction, golds) == pytest.approx(max([slow_f1(prediction, g) for g in usable], default=0.0))


@many
@given(texts, gold_lists)
def test_scores_are_ordered_and_bounded(prediction, golds):
    em, subem, overlap = (score(prediction, golds) for score in (exact_match, substring_match, f1))
    assert em <= subem <= 1.0
    assert em <= overlap <= 1.0
    assert overlap >= 0.0
    if em:
        assert overlap == 1.0


@many
@given(texts, gold_lists, texts)
def test_another_gold_never_lowers_a_score(prediction, golds, more):
    for score in (exact_match, substring_match, f1):
        assert score(prediction, golds) <= score(prediction, [*golds, more])
        assert score(prediction, golds) == score(prediction, golds[::-1])


@many
@given(texts, texts)
def test_f1_is_symmetric(left, right):
    assert f1(left, [right]) == f1(right, [left])


@many
@given(texts)
def test_a_gold_answer_has_full_marks(gold):
    if normalize(gold):
        assert exact_match(gold, [gold]) == substring_match(gold, [gold]) == f1(gold, [gold]) == 1.0
