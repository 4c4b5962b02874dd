"""A split of our own for every question of a folder, by a hash of its text, stratified by dataset and hops.

In each stratum the questions are ranked by the hash of their normalised text, and the ranks are cut at the shares,
rounded by largest remainder: shares are exact, and a further question moves at most one single question across each
cut of its stratum. (A threshold on the hash would move none, but a stratum of few questions could then lack a split.)
Questions of one text and near-duplicates form a group, which is put into one split as a whole; groups are placed before
single questions, and their hash says where, as far as the shares have room.

The result depends on the questions alone, not on their order or on the split that they were published with.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.conf import require
from tasks.data.near import Pair
from tasks.store import Row

NOTE = "Our own split of published rows; not comparable with papers."
Stratum = tuple[str, int]


@dataclass(frozen=True)
class Resplit:
    """Shares of the splits; they sum to 1. A split that is left out gets no question."""

    train: float
    dev: float | None = None
    test: float | None = None

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            require(share > 0, name, share, "a share above 0, or no such key")
        total = sum(self.shares.values())
        require(abs(total - 1) <= 1e-9, "sum of shares", round(total, 10), "1")

    @property
    def shares(self) -> dict[str, float]:
        """Split -> share, in the order in which ranks are cut."""
        found = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: share for name, share in found.items() if share is not None}


def assign(rows: Sequence[tuple[Stratum, bytes]], pairs: Iterable[Pair], conf: Resplit) -> list[str]:
    """The split of each question.

    Args:
        rows: of each question its dataset and hops, and the hash of its normalised text.
        pairs: texts that must be in one split.
        conf: the shares.
    """
    groups = _grouped(rows, pairs)
    sizes = Counter(stratum for stratum, _ in rows)
    room = {stratum: _quotas(size, conf.shares) for stratum, size in sizes.items()}
    splits = [""] * len(rows)
    large = [(root, members) for root, members in groups.items() if len(members) > 1]
    for root, members in sorted(large, key=lambda group: (-len(group[1]), group[0])):
        needed = Counter(rows[member][0] for member in members)
        chosen = _place(root, needed, room, conf.shares)
        for stratum, count in needed.items():
            _take(room[stratum], chosen, count)
        for member in members:
            splits[member] = chosen

    single = [members[0] for members in groups.values() if len(members) == 1]
    for member in sorted(single, key=lambda member: rows[member][1]):
        left = room[rows[member][0]]
        splits[member] = next(split for split, count in left.items() if count)
        left[splits[member]] -= 1
    return splits


def _grouped(rows: Sequence[tuple[Stratum, bytes]], pairs: Iterable[Pair]) -> dict[bytes, list[int]]:
    """Least hash of each group -> its questions."""
    above = {key: key for _, key in rows}

    def root(key: bytes) -> bytes:
        while above[key] != key:
            above[key] = key = above[above[key]]
        return key

    for pair in pairs:
        if pair[0] in above and pair[1] in above:
            one, other = sorted(map(root, pair))
            above[other] = one
    groups: dict[bytes, list[int]] = {}
    for member, (_, key) in enumerate(rows):
        groups.setdefault(root(key), []).append(member)
    return groups


def _quotas(size: int, shares: Mapping[str, float]) -> dict[str, int]:
    """How many of `size` questions each split gets: largest remainder, the first split where remainders are equal.

    >>> _quotas(5, {"train": 0.6, "dev": 0.1, "test": 0.3})
    {'train': 3, 'dev': 1, 'test': 1}
    """
    exact = {name: size * share for name, share in shares.items()}
    quotas = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(shares, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: size - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


def _place(
    root: bytes, needed: Mapping[Stratum, int], room: Mapping[Stratum, Mapping[str, int]], shares: Mapping[str, float]
) -> str:
    """The split of a group: drawn by its hash; where it does not fit in, the largest share that it fits into."""
    # Of the least hash another one, because least hashes are small and would draw the first split too often.
    drawn = int.from_bytes(hashlib.blake2b(root, digest_size=8).digest()) / 2**64
    bound, first = 0.0, next(reversed(list(shares)))
    for name, share in shares.items():
        bound += share
        if drawn < bound:
            first = name
            break

    order = [first, *sorted(shares.keys() - {first}, key=lambda name: (-shares[name], name))]
    for name in order:
        if all(room[stratum][name] >= count for stratum, count in needed.items()):
            return name
    return max(order, key=lambda name: sum(min(room[stratum][name], count) for stratum, count in needed.items()))


def _take(left: dict[str, int], split: str, count: int) -> None:
    """Take room for `count` questions of a split; what it lacks is taken from the split that has most."""
    for _ in range(count):
        left[split if left[split] else max(left, key=lambda name: left[name])] -= 1


def moves(rows: Iterable[tuple[str, str, str]]) -> Row:
    """Dataset -> published split -> new split -> number of questions, of (dataset, published, new) of each."""
    found: Row = {}
    for (dataset, published, new), count in Counter(rows).items():
        found.setdefault(dataset, {}).setdefault(published, {})[new] = count
    return found
