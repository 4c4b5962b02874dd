"""Checks the numbers that a service returns, because a missing or infinite score would be trained on."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.conf import is_trainable

_MEND = "Mend the service, a file of tasks/services/."


def check_list(found: object, count: int, where: str, each: str) -> None:
    """Raise the ValueError, which begins with `where`, unless this is a list with an entry for `each` of `count`."""
    if not isinstance(found, list | tuple) or len(found) != count:
        shown = f"a list of {len(found)}" if isinstance(found, list | tuple) else f"{found!r:.80}"
        raise ValueError(f"{where}: found {shown}, expected a list of {count}, one entry for each {each}. {_MEND}")


def check_numbers(found: Sequence[float], count: int, where: str, each: str) -> None:
    """The same for a list of finite numbers."""
    check_list(found, count, where, each)
    for number, value in enumerate(found, 1):
        if not is_trainable(value):
            raise ValueError(f"{where}: {each} {number}: found {value!r:.80}, expected a finite number. {_MEND}")


def check_probabilities(found: Sequence[float | None], count: int, where: str) -> None:
    """The same for probabilities of the start and of each turn; null stands for a turn without one."""
    check_list(found, count, where, "turn, and one before the first")
    for number, value in enumerate(found):
        is_allowed = (number > 0 and value is None) or (is_trainable(value) and 0 <= (value or 0) <= 1)
        if not is_allowed:
            name = f"turn {number}" if number else "before the first turn"
            raise ValueError(f"{where}: {name}: found {value!r:.80}, expected a number from 0 to 1. {_MEND}")
