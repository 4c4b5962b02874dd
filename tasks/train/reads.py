"""What the updates of a step read: tokens, and for each of them the tokens that it attends to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from tasks.engine import Plan, Sharing
from tasks.flops import Read
from tasks.rl.experience import Experience, prefix_groups


def read_by(experience: Experience, plan: Plan, sharing: Sharing) -> Read:
    """What a model reads in a forward pass over these micro-batches.

    The last token of a sample is only predicted. What samples of a micro-batch share is read once.

    Args:
        experience: of a step.
        plan: micro-batches.
        sharing: what samples of a micro-batch share; see `tasks.engine.Training`.
    """
    spans = [span for rows in plan for span in _spans(experience, rows, sharing)]
    chosen = [row for rows in plan for row in rows]
    return Read(
        positions=sum(stop - start for start, stop in spans),
        pairs=sum(_pairs(stop) - _pairs(start) for start, stop in spans),
        predicted=int(experience.loss_mask[chosen, 1:].sum()),
    )


def _pairs(length: int) -> int:
    """Pairs of a text: its first token attends to itself, the next one to two, and so on."""
    return length * (length + 1) // 2


def _spans(experience: Experience, rows: Sequence[int], sharing: Sharing) -> Iterator[tuple[int, int]]:
    """Pieces of texts that are read, as (start, stop); what stands before a piece was read with another one."""
    stops = {row: int(experience.lengths[row]) - 1 for row in rows}
    if sharing == "longest":
        yield from _branches([experience.ids[row, :stop] for row, stop in stops.items()])
    elif sharing:
        for group in prefix_groups(experience, rows):
            prefix = int(experience.prefix_lengths[group[0]])
            yield 0, prefix
            yield from ((prefix, stops[row]) for row in group)
    else:
        yield from ((0, stop) for stop in stops.values())


def _branches(texts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Of texts in order, each [t], what the one before does not begin with."""
    before: Tensor | None = None
    for text in sorted(texts, key=Tensor.tolist):
        start = 0
        if before is not None:
            shorter = min(len(before), len(text))
            differ = (before[:shorter] != text[:shorter]).nonzero()
            start = int(differ[0]) if len(differ) else shorter
        yield start, len(text)
        before = text
