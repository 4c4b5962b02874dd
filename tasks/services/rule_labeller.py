"""Labels pivots by rule: a search whose query asks for the next golden hop, and whose result shows that hop's answer.

Hops are matched in sequence: once a search has found a hop, only the next hop can make a pivot. So a repeated search is
none, and neither is one that comes too early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import Share, require
from tasks.data.decomposition import hops_of
from tasks.services import Resources, Role, StepLabels
from tasks.types import Hop, Question, Turn


@dataclass(frozen=True)
class RuleLabeller:
    """See the module.

    Attributes:
        min_match: smallest F1 of the words of a query with those of the hop's question, or of one of its reference
            queries, at which the query asks for the hop.
    """

    role: ClassVar[Role] = "labeller"
    needs_reference: ClassVar[bool] = False

    min_match: Share

    def __post_init__(self) -> None:
        require(self.min_match > 0, "min_match", self.min_match, "above 0; 0 takes any query for any hop")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[RuleLabeller]:
        """There is nothing to start."""
        yield self

    def label(self, played: Iterable[tuple[Question, Sequence[Turn]]]) -> Iterator[StepLabels]:
        """See `tasks.services.Labeller`."""
        for question, turns in played:
            yield StepLabels(tuple(self._pivots(hops_of(question), turns)))

    def _pivots(self, hops: Sequence[Hop], turns: Sequence[Turn]) -> Iterator[bool]:
        missing = list(hops)
        for turn in turns:
            if turn.executed:
                is_pivot = bool(missing) and self._finds(turn, missing[0])
                yield is_pivot
                missing = missing[is_pivot:]

    def _finds(self, turn: Turn, hop: Hop) -> bool:
        wanted = [hop.question, *hop.queries]
        asks = any(text.f1(query, wanted) >= self.min_match for query in turn.action.searches)
        return asks and text.contains_words(turn.observation, hop.answer)


PART = RuleLabeller
