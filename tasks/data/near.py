"""Near-duplicate questions: those with a common answer and nearly the same words, where rare words count more.

Most pairs that share nearly all words ask of different things ("Who directed Alien?", "Who directed Heat?"), so a plain
share of common words finds the wrong ones. Here a word weighs log(1 + N / n), in N different texts of which n have it:
names weigh much, the words of a template little. Two questions are near-duplicates if the common words have at least
`LIKENESS` of the weight of all their words (weighted Jaccard) and a normalised answer is common.

What is found depends on the questions alone, not on their order. Questions of the same normalised text are one text
here; `tasks.data.ingest` treats them as the same question.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.store import Row
from tasks.text import normalize
from tasks.types import Question

LIKENESS = 0.7
MOST_COMPARED = 100
"""A text is compared with this many others for each of its rare words, so that no data takes quadratic time."""
NUM_EXAMPLES = 20
Pair = tuple[bytes, bytes]


@dataclass
class Texts:
    """The different texts of questions, each with the answers of all questions that have it.

    Attributes:
        num_left_out: comparisons that the last `pairs` left out because of `MOST_COMPARED`.
    """

    num_left_out: int = 0
    _texts: dict[bytes, str] = field(default_factory=dict)
    _answers: dict[bytes, set[int]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)  # Of normalised answers.

    def add(self, key: bytes, question: Question) -> None:
        """Add a question; `key` stands for its normalised text."""
        self._texts.setdefault(key, normalize(question.question))
        answers = self._answers.setdefault(key, set())
        for answer in filter(None, map(normalize, question.answers)):
            answers.add(self._numbers.setdefault(answer, len(self._numbers)))

    def pairs(self) -> Iterator[Pair]:
        """The keys of each two near-duplicates, once and in an order of their texts.

        A text is looked up by its rarest words alone: the others together weigh less than `LIKENESS` of it, so every
        near-duplicate has one of them among its own rarest words.
        """
        keys = sorted(self._texts, key=self._texts.__getitem__)  # Texts that begin alike are neighbours.
        words, weights = _weighed([self._texts[key] for key in keys])
        totals = [sum(weights[word] for word in own) for own in words]
        having: dict[int, list[int]] = {}
        self.num_left_out = 0

        for number, own in enumerate(words):
            others: set[int] = set()
            for word in _rarest(own, weights, totals[number]):
                known = having.setdefault(word, [])
                self.num_left_out += max(0, len(known) - MOST_COMPARED)
                others.update(known[-MOST_COMPARED:])
                known.append(number)

            answers, own_words = self._answers[keys[number]], set(own)
            for other in sorted(others):
                if answers.isdisjoint(self._answers[keys[other]]):
                    continue
                common = sum(weights[word] for word in words[other] if word in own_words)
                if common >= LIKENESS * (totals[number] + totals[other] - common):
                    yield keys[other], keys[number]


def _weighed(texts: Sequence[str]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The words of each text as numbers, its rarest first, and the weight of each word in thousandths."""
    counts = Counter(word for text in texts for word in set(text.split()))
    order = sorted(counts, key=lambda word: (counts[word], word))
    numbers = {word: number for number, word in enumerate(order)}
    words = [tuple(sorted({numbers[word] for word in text.split()})) for text in texts]
    return words, [round(1000 * math.log1p(len(texts) / counts[word])) for word in order]


def _rarest(words: Sequence[int], weights: Sequence[int], total: int) -> Iterator[int]:
    """The first words, until the others weigh less than `LIKENESS` of all."""
    rest = total
    for word in words:
        if rest < LIKENESS * total:
            return
        yield word
        rest -= weights[word]


def counted(pairs: Iterable[Pair], rows: Mapping[bytes, Sequence[tuple[str, str]]]) -> Row:
    """What the manifest says of near-duplicates.

    Args:
        pairs: of `Texts.pairs`.
        rows: key of a text -> id and split of each of its questions.
    """
    num_pairs, across, trained = 0, Counter[str](), set[str]()
    examples: list[list[str]] = []
    for pair in pairs:
        one, other = (rows.get(key, ()) for key in pair)
        if not one or not other:  # All questions of a text were left out.
            continue
        num_pairs += 1
        sides = {tuple(sorted((left, right))) for _, left in one for _, right in other if left != right}
        across.update(" and ".join(side) for side in sides)
        leaks = [(a, b) for a, b in ((one, other), (other, one)) if any(split != "train" for _, split in b)]
        near = {name for a, _ in leaks for name, split in a if split == "train"}
        trained |= near
        if near and len(examples) < NUM_EXAMPLES:
            examples.append([one[0][0], other[0][0]])
    return {
        "likeness": LIKENESS,
        "pairs": num_pairs,
        "pairs_across_splits": dict(across),
        "train_rows_near_evaluation": len(trained),
        "examples": examples,
    }
