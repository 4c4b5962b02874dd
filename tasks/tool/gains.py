"""How much better another model answers from an agent's evidence than from a plain search: means with intervals.

The best plain search is the one whose answers are right most often, on the same questions: a comparison that favours
plain search. Differences are paired by seed and question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.evaluate.statistics import Interval, bootstrap_means
from tasks.records.read_answers import ReadAnswer
from tasks.store import DataError

EVIDENCE = "agent's evidence"
PASSAGES_READ = "passages that the agent read"
ALL = "all"
HEADER = ("what the model reads", "hops", "questions", "EM", "F1", "EM against the best plain search")


@dataclass(frozen=True)
class Gain:
    """One source of what is read, over all questions or those with so many hops.

    Attributes:
        source: what was read.
        hops: of the questions; `all` for all.
        em, f1: of the model's answers.
        em_gain: exact match minus that of the best plain search; None for that search itself.
    """

    source: str
    hops: str
    em: Interval
    f1: Interval
    em_gain: Interval | None

    @property
    def cells(self) -> list[str]:
        """The texts under `HEADER`."""
        return [self.source, self.hops, str(self.em.num_questions), *map(_text, (self.em, self.f1, self.em_gain))]


def _text(one: Interval | None) -> str:
    return "-" if one is None else one.text()


def plain(count: int) -> str:
    """Name of a plain search with so many passages."""
    return f"plain search, {count} passage{'s' if count > 1 else ''}"


def gains(by_seed: Sequence[Sequence[ReadAnswer]], num_resamples: int = 2000) -> list[Gain]:
    """Means over questions and seeds, of all questions and by hops.

    Args:
        by_seed: the answers of each seed, to the same questions from the same sources.
        num_resamples: behind each interval.

    Raises:
        DataError: seeds differ in their questions or sources.
    """
    tables, hops = _tables(by_seed)
    rivals = [source for source in tables if source.startswith("plain")]
    best = max(rivals, key=lambda source: float(tables[source][..., 0].mean()))
    parts = {ALL: hops > 0} | {str(count): hops == count for count in sorted(set(hops.tolist()))}
    seeds = len(by_seed)
    over = [range(first, first + seeds) for first in (0, seeds, 2 * seeds)]
    found = []
    for name, chosen in parts.items():
        for source, table in tables.items():
            em, f1, rival = table[chosen][..., 0], table[chosen][..., 1], tables[best][chosen][..., 0]
            columns = np.column_stack([em, f1, em - rival])  # [Q, 3 * S]
            means = bootstrap_means(columns, num_resamples, over=over, bounds=[(0, 1), (0, 1), (-1, 1)])
            found.append(Gain(source, name, means[0], means[1], None if source == best else means[2]))
    return found


def _tables(by_seed: Sequence[Sequence[ReadAnswer]]) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int64]]:
    """Source -> exact match and F1 [Q, S, 2]; and the hops [Q] of the questions."""
    first = by_seed[0]
    asked = [(row.source, row.question_id) for row in first]
    for rows in by_seed[1:]:
        if [(row.source, row.question_id) for row in rows] != asked:
            raise DataError(
                "answers.jsonl: seeds differ in their questions or sources. Expected the same of every seed; run stage "
                "`tool` again."
            )
    tables = {}
    for source in dict.fromkeys(row.source for row in first):
        scores = [[(row.em, row.f1) for row in rows if row.source == source] for rows in by_seed]
        tables[source] = np.array(scores).transpose(1, 0, 2)
    hops = [row.hops for row in first if row.source == first[0].source]
    return tables, np.array(hops)


def markdown(found: Sequence[Gain]) -> str:
    """The gains as a table."""
    lines = [HEADER, ("---", "---", "---:", "---", "---", "---"), *(one.cells for one in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
