"""A judge by rule (SLATE) that knows the truth of the data: the hops of a question, their queries and their answers.

It needs no model and says of every score why. A hop is known once its supporting passage was retrieved, or any passage
that shows its answer where the data names none; the first hop that is not known is the open one. A question without a
decomposition is one hop. The judge reads what was retrieved from the environment's record and never from what the
policy wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.data.decomposition import hops_of
from tasks.services import Judged, Judgement, Resources, Role
from tasks.types import Hit, Hop

# Words of a question that name nothing.
_EMPTY = frozenset(
    "who whom whose what where when which how is was are were be did does do of in on at to for by".split()
)


@dataclass(frozen=True)
class RuleJudge:
    """The rules of the three scores.

    A thought is bad where it is empty or names the answer before any passage showed it, good where it names what the
    open hop asks for, or what was found once no hop is open. A query is compared with the reference queries of the
    open hop. An answer is good where it matches a gold answer exactly, and bad where it shares no word with any.

    SLATE Appendix A.14 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        good: F1 with a reference query from which on a query is good.
        acceptable: F1 from which on it is acceptable.
    """

    role: ClassVar[Role] = "judge"
    needs_reference: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("decomposition",)

    good: float
    acceptable: float

    def __post_init__(self) -> None:
        require(0 < self.good <= 1, "good", self.good, "above 0, at most 1")
        require(0 < self.acceptable <= self.good, "acceptable", self.acceptable, "above 0, at most good")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[RuleJudge]:
        """Starts and closes nothing; this object judges."""
        yield self

    def judge(self, items: Sequence[Judged]) -> list[Judgement]:
        """See `tasks.services.Judge`."""
        rules = {"thought": self._thought, "query": self._query, "answer": self._answer}
        return [Judgement(*rules[item.aspect](item)) for item in items]

    def _thought(self, item: Judged) -> tuple[int, str]:
        words = set(text.normalize(item.thought).split())
        if not words:
            return -1, "there is no thought"
        if not _shown(item) and any(text.contains_words(item.thought, gold) for gold in item.question.answers):
            return -1, "it names the answer, which no passage has shown"

        hops = hops_of(item.question)
        hop = _open_hop(item, hops)
        needed = _topics(hops[-1] if hop is None else hop)
        if hop is None:
            needed |= set(text.normalize(hops[-1].answer).split())
        named = sorted(words & needed)
        if not named:
            return 0, "it names nothing that is looked for now"
        return 1, f"it names what {'was' if hop is None else 'is'} looked for: {' '.join(named)}"

    def _query(self, item: Judged) -> tuple[int, str]:
        asked = {text.normalize(query) for turn in item.before if turn.executed for query in turn.action.searches}
        if text.normalize(item.content) in asked:
            return -1, "it repeats an earlier query"
        hop = _open_hop(item, hops_of(item.question))
        if hop is None:
            return -1, "everything it could look for is known"

        f1 = text.f1(item.content, (hop.question, *hop.queries))
        score = 1 if f1 >= self.good else 0 if f1 >= self.acceptable else -1
        return score, f"F1 {f1:.2f} with the queries for {hop.question!r}"

    def _answer(self, item: Judged) -> tuple[int, str]:
        if text.exact_match(item.content, item.question.answers):
            return 1, "it is a gold answer"
        f1 = text.f1(item.content, item.question.answers)
        return (0 if f1 else -1), f"F1 {f1:.2f} with the gold answers"


def _hits(item: Judged) -> list[Hit]:
    return [hit for turn in item.before for hit in turn.hits]


def _open_hop(item: Judged, hops: Sequence[Hop]) -> Hop | None:
    """The first hop whose answer is not known yet; None where all are."""
    hits = _hits(item)
    ids = {hit.passage_id for hit in hits}

    def is_known(hop: Hop) -> bool:
        if hop.support_passage_id is not None:
            return hop.support_passage_id in ids
        return any(text.contains_words(f"{hit.title} {hit.text}", hop.answer) for hit in hits)

    return next((hop for hop in hops if not is_known(hop)), None)


def _shown(item: Judged) -> bool:
    """Whether the question or a passage that was found names a gold answer."""
    texts = [item.question.question, *(f"{hit.title} {hit.text}" for hit in _hits(item))]
    return any(text.contains_words(one, gold) for one in texts for gold in item.question.answers)


def _topics(hop: Hop) -> set[str]:
    """The words of a hop's queries, without those that name nothing."""
    return {word for query in hop.queries for word in text.normalize(query).split()} - _EMPTY


PART = RuleJudge
