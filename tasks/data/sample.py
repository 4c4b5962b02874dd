"""Which of the questions are played: a split, or a seeded sample of it that no dataset dominates. Reads no files."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tasks.types import Question


def chosen_splits(rows: Iterable[tuple[str, str]], splits: Sequence[str]) -> dict[str, str]:
    """Dataset -> the first of `splits` that it has, of (dataset, split) of each question.

    >>> chosen_splits([("nq", "dev"), ("nq", "test"), ("hotpotqa", "dev"), ("mine", "train")], ["test", "dev"])
    {'hotpotqa': 'dev', 'nq': 'test'}
    """
    found = set(rows)
    first = {
        name: [split for split in splits if (name, split) in found] for name in sorted({name for name, _ in found})
    }
    return {name: having[0] for name, having in first.items() if having}


def choose(questions: Sequence[Question], splits: Sequence[str], limit: int, seed: int = 0) -> list[Question]:
    """The questions that are played, in order of id.

    Args:
        questions: of all splits and datasets.
        splits: of each dataset the first of these that it has is played, so that no number mixes two splits of one set.
        limit: of a seeded sample, taken in equal parts from each dataset; 0 is none.
        seed: of the sample.
    """
    chosen = chosen_splits(((q.dataset, q.split) for q in questions), splits)
    found = sorted((q for q in questions if chosen.get(q.dataset) == q.split), key=lambda q: q.id)
    if not limit or limit >= len(found):
        return found
    by_dataset: dict[str, list[Question]] = {}
    for question in found:
        by_dataset.setdefault(question.dataset, []).append(question)
    for name, rows in by_dataset.items():
        random.Random(f"{seed}/{name}").shuffle(rows)
    taken: list[Question] = []
    for depth in range(max(map(len, by_dataset.values()))):
        taken += [rows[depth] for rows in by_dataset.values() if depth < len(rows)]
    return sorted(taken[:limit], key=lambda q: q.id)
