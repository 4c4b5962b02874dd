"""Which of the questions are played: a split, or a seeded sample of it that no dataset dominates. Reads no files."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tasks.types import Question


def choose(questions: Sequence[Question], splits: Sequence[str], limit: int, seed: int = 0) -> list[Question]:
    """The evaluation questions in order of id; with a limit, a seeded sample taken in equal parts from each dataset."""
    found = sorted((q for q in questions if q.split in splits), key=lambda q: q.id)
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
