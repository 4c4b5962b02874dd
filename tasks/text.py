"""Normalisation of answers, and the scores EM, F1 and subEM: rewards and evaluation use the same definitions.

The rules are those of SQuAD and of Search-R1's released code, applied to composed letters. A score is a float in
[0, 1], the best over all gold answers. A gold answer that normalises to nothing is ignored, because it would match
every empty prediction.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LINE_ENDS = re.compile("\r\n|[\r\x85\u2028\u2029]")
_YES_NO = {"yes", "no"}
MIN_FINDABLE = 3
"""Characters of the shortest normalised answer that is looked for in passages."""


def composed(text: str) -> str:
    """The one spelling of texts that read alike: Unicode's NFC, such as one character for e with an acute accent.

    Not NFKC, which makes different texts equal: it reads 10\u00b2 as 102.

    >>> composed("Rho\u0302ne") == "Rh\u00f4ne", composed("10\u00b2") == "102"
    (True, False)
    """
    return unicodedata.normalize("NFC", text)


def spelled(text: str) -> str:
    """The composed text with \\n at the end of each line, whatever ended the lines; data is read in this spelling."""
    return _LINE_ENDS.sub("\n", composed(text))


def normalize(text: str) -> str:
    """The composed text in lower case, then without ASCII punctuation, then without articles, with single spaces.

    Search-R1 qa_em.py:36 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/search_r1.md). It does not compose: there two
    spellings of one answer differ.

    >>> normalize("The U.S.A.!"), normalize("twenty-one")
    ('usa', 'twentyone')
    """
    return " ".join(_ARTICLES.sub(" ", composed(composed(text).lower()).translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 if the normalised prediction equals a normalised gold answer, else 0.0; None stands for no answer.

    Search-R1 Section 3.4 (arXiv 2503.09516; docs/methods/search_r1.md)
    PiCA Eq. 15 (arXiv 2605.09287; docs/methods/pica.md)
    """
    return float(prediction is not None and normalize(prediction) in _normal_golds(golds))


def contains_words(passage: str, words: str) -> bool:
    """Whether the normalised passage contains these words as whole words, in order; nothing contains no words.

    >>> contains_words("It rises in Norway.", "Norway"), contains_words("It rises in Norway.", "no")
    (True, False)
    """
    return contains_any(passage, (normalize(words),))


def contains_any(passage: str, answers: Iterable[str]) -> bool:
    """`contains_words` for any of several answers that are normalised already."""
    padded = f" {normalize(passage)} "
    return any(answer and f" {answer} " in padded for answer in answers)


def findable(golds: Sequence[str]) -> tuple[str, ...]:
    """The normalised answers that are looked for in passages; none where finding them would say nothing.

    Yes, no and an answer of one or two characters stand in most passages by chance. The main answer, which comes
    first, decides about the question; among its aliases only such answers are left out.

    >>> findable(["United States", "US", "the U.S.A."]), findable(["Yes"]), findable(["7", "seven"])
    (('united states', 'usa'), (), ())
    """
    normal = [normalize(gold) for gold in golds]
    long = [gold for gold in dict.fromkeys(normal) if len(gold) >= MIN_FINDABLE and gold not in _YES_NO]
    return tuple(long) if normal[:1] == long[:1] else ()


def substring_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 if the normalised prediction contains a normalised gold answer, else 0.0 (subEM).

    DSPO Eq. 4 (arXiv 2510.09255; docs/methods/dspo.md)
    """
    if prediction is None:
        return 0.0
    text = normalize(prediction)
    return float(any(gold in text for gold in _normal_golds(golds)))


def f1(prediction: str | None, golds: Iterable[str]) -> float:
    """F1 of the words of prediction and gold answer, repeated words counted; the largest over the gold answers.

    StepSearch Eq. 2 (arXiv 2505.15107; docs/methods/stepsearch.md)
    PiCA Eq. 17 (arXiv 2605.09287; docs/methods/pica.md)

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
