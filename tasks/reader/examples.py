"""Questions with evidence and the right answer, from gold passages: what a reader is trained and measured on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.reader.settings import KINDS, EvidenceConf
from tasks.types import Passage, Question


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        kind: of the evidence, see `EvidenceConf`.
        question, evidence: what is read.
        answer: the right answer.
    """

    kind: str
    question: str
    evidence: str
    answer: str


@dataclass(frozen=True)
class Exercises:
    """Draws exercises about questions whose gold passages are known.

    Attributes:
        questions: with gold passages, the one that holds the answer last.
        passages: of the corpus, by id.
        conf: shares of the kinds of evidence.
        unknown: the right answer where evidence holds none.
    """

    questions: Sequence[Question]
    passages: Mapping[str, Passage]
    conf: EvidenceConf
    unknown: str

    def draw(self, count: int, seed: str) -> list[Exercise]:
        """`count` exercises that depend on the seed alone."""
        rng = random.Random(seed)
        weights = [getattr(self.conf, kind) for kind in KINDS]
        return [self._exercise(rng, rng.choice(self.questions), *rng.choices(KINDS, weights)) for _ in range(count)]

    def _exercise(self, rng: random.Random, question: Question, kind: str) -> Exercise:
        golds = list(question.gold_passage_ids)
        others = self._others(rng, question) if kind in ("noisy", "missing") else []
        chosen = {"last": golds[-1:], "chain": golds, "noisy": [golds[-1], *others], "missing": others}[kind]
        if kind == "noisy":
            rng.shuffle(chosen)
        texts = [self.passages[passage].text for passage in chosen]
        answer = self.unknown if kind == "missing" else question.answers[0]
        return Exercise(kind, question.question, " ".join(texts), answer)

    def _others(self, rng: random.Random, question: Question) -> list[str]:
        """Passages that do not hold the answer: of earlier hops, or gold ones of other questions."""
        earlier = list(question.gold_passage_ids[:-1])
        others = [rng.choice(rng.choice(self.questions).gold_passage_ids) for _ in range(self.conf.num_others)]
        pool = [name for name in (*earlier, *others) if question.answers[0] not in self.passages[name].text]
        return rng.sample(pool, rng.randint(1, min(len(pool), self.conf.num_others))) if pool else []


def usable(questions: Sequence[Question], passages: Mapping[str, Passage]) -> list[Question]:
    """The questions whose gold passages all stand in the corpus, the last of which holds the answer."""
    return [
        question
        for question in questions
        if question.gold_passage_ids
        and all(passage in passages for passage in question.gold_passage_ids)
        and question.answers[0] in passages[question.gold_passage_ids[-1]].text
    ]
