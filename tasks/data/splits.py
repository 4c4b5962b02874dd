"""Whether data has questions of the splits that a run plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def counted(splits: Iterable[str]) -> Counter[str]:
    """The number of questions by split, in order of its name."""
    return Counter(sorted(splits))


def described(counts: Counter[str]) -> str:
    """The numbers for a message.

    >>> described(counted(["train", "test", "train"]))
    '1 test, 2 train'
    """
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def require_evaluated(counts: Counter[str], splits: Sequence[str], data: str) -> None:
    """Raise the ValueError where no question belongs to one of the splits; `data` is a file of `conf/data/`."""
    if not any(counts[name] for name in splits):
        raise ValueError(
            f"conf/data/{data}.yaml: evaluate_splits={list(splits)}: artifacts/data has no question of these, but "
            f"{described(counts)}. Name a split that the data has."
        )
