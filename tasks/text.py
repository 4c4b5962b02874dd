"""Answer normalisation and string scores: one definition for rewards and evaluation.

Source: search_r1 section 3 and 10 (the SQuAD rules). Scores are floats in [0, 1], the best over the
gold answers; a gold that normalises to nothing is ignored because it would match every empty answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Lower-case, delete ASCII punctuation, blank out articles, collapse white space: in this order.

    >>> normalize("The U.S.A.!"), normalize("twenty-one")
    ('usa', 'twentyone')
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 if the normalised prediction equals a normalised gold; None (no answer) scores 0."""
    return float(prediction is not None and normalize(prediction) in _normal_golds(golds))


def substring_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 if a normalised gold is a substring of the normalised prediction (subEM)."""
    if prediction is None:
        return 0.0
    text = normalize(prediction)
    return float(any(gold in text for gold in _normal_golds(golds)))


def f1(prediction: str | None, golds: Iterable[str]) -> float:
    """Word-level multiset F1, the maximum over golds, never rounded.

    >>> f1("New York City", ["New York"])
    0.8
    """
    if prediction is None:
        return 0.0
    words = normalize(prediction).split()
    return max((_f1(words, gold.split()) for gold in _normal_golds(golds)), default=0.0)


def _f1(prediction: list[str], gold: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(gold)).values())
    return 2 * common / (len(prediction) + len(gold)) if common else 0.0


def _normal_golds(golds: Iterable[str]) -> set[str]:
    return {gold for gold in map(normalize, golds) if gold}
