"""What rewards of single actions share: the thought before an action, the bonus for an early answer."""

from __future__ import annotations

import re
from typing import Literal

from tasks.types import Trajectory

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def thought_of(text: str) -> str:
    """The content of the first think block of an action, stripped; empty where it has none.

    >>> thought_of("<think> next mayor </think> <search> Avenor mayor </search>")
    'next mayor'
    """
    block = _THOUGHT.search(text)
    return block[1].strip() if block else ""


def turns_of(trajectory: Trajectory, which: Literal["last", "all"]) -> list[int]:
    """Numbers of the turns to reward; one in which the policy wrote nothing is left out."""
    numbers = range(len(trajectory.turns))
    chosen = numbers if which == "all" else numbers[-1:]
    return [number for number in chosen if trajectory.turns[number].end > trajectory.turns[number].start]


def early_bonus(bonus: float, budget: int, step: int) -> float:
    """bonus * (budget - step) / budget for an answer at this step, which counts from 1; never below 0.

    SLATE Eq. 6 (arXiv 2602.23440; docs/methods/slate.md)

    >>> [round(early_bonus(0.1, 4, step), 3) for step in (1, 2, 3, 4)]
    [0.075, 0.05, 0.025, 0.0]
    """
    return bonus * max(budget - step, 0) / budget
