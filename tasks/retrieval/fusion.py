"""Reciprocal rank fusion combines several rankings by ranks alone, so that scores need no common scale.

score(d) = sum over rankings r that hold d of weight_r / (k + rank_r(d)), ranks from 1; the paper has k = 60
and weights of 1. It is computed here, so that it needs no feature or licence of a server.
RRF Paper (doi 10.1145/1571941.1572114; docs/methods/search.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasks.types import Hit


def fuse(rankings: Sequence[Sequence[Hit]], top_k: int, k: float = 60.0, weights: Sequence[float] = ()) -> list[Hit]:
    """The `top_k` best passages of all rankings together, best first, each with its fused score.

    Equal scores keep the order in which the passages are met: first ranking first, best rank first.

    Args:
        rankings: hits of one query, best first, no passage twice in one ranking.
        top_k: most hits to return; the rankings together may hold fewer passages.
        k: damps the first ranks; with a larger k they weigh less against later ranks.
        weights: one per ranking; empty: all are 1.

    >>> from tasks.types import Hit
    >>> a, b, c = (Hit(name, 1.0, "", "") for name in "abc")
    >>> [(hit.passage_id, round(hit.score, 4)) for hit in fuse([[a, b], [b, c]], 2)]
    [('b', 0.0325), ('a', 0.0164)]
    """
    found: dict[str, Hit] = {}
    scores: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, hit in enumerate(ranking, start=1):
            found.setdefault(hit.passage_id, hit)
            scores[hit.passage_id] = scores.get(hit.passage_id, 0.0) + weight / (k + rank)
    best = sorted(found, key=lambda name: -scores[name])[:top_k]
    return [replace(found[name], score=scores[name]) for name in best]
