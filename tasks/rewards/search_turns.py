"""StepSearch's reward of search turns: what a search added about the gold passages, minus the share it repeated.

Retrieved documents come from the environment's record, never from tags.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, Field, on_turns
from tasks.types import Question, Scores, Trajectory

_TOKEN = re.compile(r"\b\w\w+\b")


@functools.lru_cache(maxsize=1 << 14)
def cosines(document: str, golds: tuple[str, ...]) -> tuple[float, ...]:
    """TF-IDF cosine of a document to each gold text, vocabulary and IDF fitted on these 1 + n texts alone.

    Texts are answer-normalised; tokens are runs of two or more word characters, tf raw counts,
    idf = ln((1 + N) / (1 + df)) + 1 with N = 1 + n, rows L2-normalised. A text without tokens has cosine 0.
    StepSearch Eq. 8 (arXiv 2505.15107; docs/methods/stepsearch.md)
    StepSearch submodule.py:5 (Zillwang/StepSearch@43215ba; docs/methods/stepsearch.md)

    >>> [round(c, 6) for c in cosines("Rome is the capital of Italy.", ("Paris is the capital of France.", "Lyon"))]
    [0.464553, 0.0]
    """
    counts = [_counts(text_) for text_ in (document, *golds)]
    df = Counter(word for text_counts in counts for word in text_counts)
    idf = {word: math.log((1 + len(counts)) / (1 + num_texts)) + 1 for word, num_texts in df.items()}
    vectors = [{word: count * idf[word] for word, count in text_counts.items()} for text_counts in counts]
    norms = [math.sqrt(sum(value * value for value in vector.values())) for vector in vectors]

    searched, searched_norm = vectors[0], norms[0]
    return tuple(
        sum(value * gold[word] for word, value in searched.items() if word in gold) / (searched_norm * norm)
        if searched_norm and norm
        else 0.0
        for gold, norm in zip(vectors[1:], norms[1:], strict=True)
    )


@functools.lru_cache(maxsize=1 << 14)
def _counts(text_: str) -> Counter[str]:
    return Counter(_TOKEN.findall(text.normalize(text_)))


def information_gains(similarities: Sequence[Sequence[float]]) -> list[float]:
    """G^t = (1/n) sum_i max(c_i^t - m_i^{t-1}, 0) with m the best so far; 0 where there is no gold passage.

    StepSearch Eq. 9, Eq. 10, Eq. 11 (arXiv 2505.15107; docs/methods/stepsearch.md)

    Args:
        similarities: one row a search round, c_i^t for each of the n gold passages.

    >>> [round(g, 6) for g in information_gains([(.6, .1), (.5, .7), (.9, .2)])]
    [0.35, 0.3, 0.15]
    """
    gains = []
    best = [0.0] * (len(similarities[0]) if similarities else 0)
    for row in similarities:
        gained = [max(value - known, 0.0) for value, known in zip(row, best, strict=True)]
        gains.append(sum(gained) / len(gained) if gained else 0.0)
        best = [max(value, known) for value, known in zip(row, best, strict=True)]
    return gains


def redundancies(rounds: Sequence[Sequence[Hashable]], inside_round: bool = False) -> list[float]:
    """P^t: share of round t's documents that an earlier round returned; 0 for an empty round.

    StepSearch Eq. 12, Eq. 13 (arXiv 2505.15107; docs/methods/stepsearch.md)

    `inside_round`: a repetition inside the round counts as well, as in the released code.

    >>> redundancies(["abc", "ade", "daf", "fg"])
    [0.0, 0.3333333333333333, 0.6666666666666666, 0.5]
    """
    seen: set[Hashable] = set()
    shares = []
    for documents in rounds:
        num_repeated = 0
        of_this_round: set[Hashable] = set()
        for document in documents:
            num_repeated += document in seen or (inside_round and document in of_this_round)
            of_this_round.add(document)
        shares.append(num_repeated / len(documents) if documents else 0.0)
        seen |= of_this_round
    return shares


def ranked(rounds: Sequence[Sequence[Hashable]]) -> list[list[Hashable]]:
    """Documents with their rank, except the last one of a round: these pairs are what the released code compares.

    It splits the rendered observation in such a way that the text of each passage but the last ends with the label of
    the next one (`Doc 2`, `Doc 3`). So a passage that comes again at another rank is another text there, no repetition.
    StepSearch qa_step.py:54 (Zillwang/StepSearch@43215ba; docs/methods/stepsearch.md)

    >>> redundancies(ranked(["ABC", "BAD", "AEC"]))
    [0.0, 0.0, 0.6666666666666666]
    """
    return [
        [(document, rank if rank < len(documents) - 1 else None) for rank, document in enumerate(documents)]
        for documents in rounds
    ]


@dataclass(frozen=True)
class SearchTurnReward(EachReward):
    """scale * (gain * G^t - penalty * P^t) on the token that completes the t-th executed search.

    Gold passages that the corpus lacks do not count. Without any gold passage G is 0, and P does not change.
    StepSearch Eq. 7, Section 2.3 (arXiv 2505.15107; docs/methods/stepsearch.md)

    Attributes:
        gain, penalty: 1 or 0, switches of the two terms.
        scale: 1 in the paper. The released code says 0.6 and has the effect of 1.6: it adds 0.6 times the rewards to
            the rewards themselves.
        as_released: the redundancy compares `ranked` documents, and counts repetitions inside a round.
    """

    components: ClassVar[tuple[str, ...]] = ("information_gain", "redundancy")

    gain: float = 1.0
    penalty: float = 1.0
    scale: float = 1.0
    as_released: bool = False

    def __post_init__(self) -> None:
        for name in ("gain", "penalty", "scale"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 (off) or more")

    @property
    def reads(self) -> tuple[Field, ...]:
        """Gold passages, unless the information gain is off."""
        return ("gold_passages",) if self.gain else ()

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        golds = tuple(passage.text for passage in question.gold_passages)
        numbers = [i for i, turn in enumerate(trajectory.turns) if turn.executed]
        rounds = [trajectory.turns[i].hits for i in numbers]

        similarities = [
            [max(column) for column in zip(*(cosines(hit.text, golds) for hit in hits), strict=True)]
            if hits
            else [0.0] * len(golds)
            for hits in rounds
        ]
        gains = information_gains(similarities)
        documents: list[list[Hashable]] = [[hit.passage_id for hit in hits] for hits in rounds]
        repeated = redundancies(ranked(documents) if self.as_released else documents, self.as_released)

        values = {
            number: self.scale * (self.gain * gain - self.penalty * share)
            for number, gain, share in zip(numbers, gains, repeated, strict=True)
        }
        return on_turns(trajectory, values, information_gain=sum(gains), redundancy=sum(repeated))


PART = SearchTurnReward
