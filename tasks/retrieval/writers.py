"""The simulator of the generated world, which writes documents for `tasks.retrieval.generated`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tasks.retrieval.generated import Document, Request


class WorldWriter:
    """The simulator of the generated world. It finds a passage by its title and searches no index.

    A useful answer begins with the passage whose title the query names. A noisy one has that title with the facts of
    another passage of the same kind. A query without a title gets random passages. Memory holds the corpus once.
    """

    def __init__(self, passages: Sequence[Document]) -> None:
        """`passages`: (title, text) of the whole corpus, at least one."""
        if not passages:
            raise ValueError("the simulator of the world needs its passages; found none.")
        self._passages = list(passages)
        self._numbers = {title: i for i, (title, _) in enumerate(self._passages)}
        self._longest = max(len(title.split()) for title, _ in self._passages)

    def write(self, requests: Sequence[Request], top_k: int, seed: str) -> list[list[Document]]:
        """See `Writer`."""
        return [self._documents(query, useful, top_k, random.Random(f"{seed}/{query}")) for query, useful in requests]

    def _documents(self, query: str, useful: bool, top_k: int, rng: random.Random) -> list[Document]:
        named = self._named(query)
        others = [self._passages[rng.randrange(len(self._passages))] for _ in range(top_k)]
        if named is None:
            return others
        title, text = self._passages[named]
        if not useful:
            false_title, false_text = self._alike(text.replace(title, ""), rng)
            text = false_text.replace(false_title, title)
        return [(title, text), *others[1:]]

    def _named(self, query: str) -> int | None:
        """The passage with the longest title that the query contains word for word."""
        words = query.split()
        for length in range(min(self._longest, len(words)), 0, -1):
            for start in range(len(words) - length + 1):
                found = self._numbers.get(" ".join(words[start : start + length]))
                if found is not None:
                    return found
        return None

    def _alike(self, frame: str, rng: random.Random) -> Document:
        """A passage whose text begins with the same words after its title; after 200 tries, any passage."""
        start = frame.split()[:3]
        title, text = self._passages[0]
        for _ in range(200):
            title, text = self._passages[rng.randrange(len(self._passages))]
            if text.replace(title, "").split()[:3] == start:
                break
        return title, text
