"""Scored samples as tensors, and their division into mini-batches and micro-batches.

Shapes: N samples, T positions of prefix and the tokens after it, right-padded. Every [N, T] tensor is aligned to
token positions: entry t belongs to token t (its logprob given the tokens before it, the value before it).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tasks.types import Sample, Scores

CountedTokens = Literal["generated", "response"]
"""Which tokens of a sample a part counts: the trained ones, or all tokens after the prefix, observations included."""


@dataclass(frozen=True)
class Experience:
    """One step's samples as tensors; optional tensors are filled by the parts of a method that need them.

    Attributes:
        ids: [N, T] token ids, 0 in the padding.
        lengths: [N] tokens of prefix and sample.
        response_mask: [N, T] True on the tokens after the prefix, observations included.
        loss_mask: [N, T] True on the tokens that are trained. The policy wrote them. Tokens of the prefix are never
            trained, even where the policy wrote them (the earlier turns that a candidate continues).
        rewards: [N, T] values placed by the rewards.
        group_ids: N ids; samples of one group are compared with each other.
        sampler_logprobs: [N, T] as the generator reported them, 0 off the loss mask.
        old_logprobs, ref_logprobs, values: [N, T], computed by the trainer before the first update.
        advantages, returns: [N, T].
        weights: [N] factors of each sample's part of the loss; None where all are 1.
        question_ids: N ids of the questions that were played; empty where nothing asks for them.
        group_tokens: [N] trained tokens of each sample's group.
    """

    ids: Tensor
    lengths: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    rewards: Tensor
    group_ids: tuple[str, ...]
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    question_ids: tuple[str, ...] = ()
    group_tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prefix_lengths(self) -> Tensor:
        """[N] tokens before each sample's own."""
        return self.lengths - self.response_mask.sum(-1)

    def rows(self, index: Sequence[int]) -> Experience:
        """These samples, trimmed to the longest of them."""
        width = int(self.lengths[list(index)].max())
        cut: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value[list(index)]
                cut[field.name] = value[:, :width] if value.dim() == 2 else value
            elif isinstance(value, tuple) and value:
                cut[field.name] = tuple(value[i] for i in index)
        return replace(self, **cut)

    def to(self, device: torch.device) -> Experience:
        """A copy whose tensors are on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: value.to(device) for name, value in moved.items()})


def collate(samples: Sequence[Sample], scores: Sequence[Scores]) -> Experience:
    """Tensors of scored samples; a reward at index i of a sample lands on position len(prefix) + i.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no sample to train on: every trajectory of this step failed or was filtered.")

    lengths = [len(sample.prefix_ids) + len(sample.ids) for sample in samples]
    count, width = len(samples), max(lengths)
    ids = torch.zeros(count, width, dtype=torch.long)
    response_mask, loss_mask = (torch.zeros(count, width, dtype=torch.bool) for _ in range(2))
    rewards, sampler = (torch.zeros(count, width) for _ in range(2))

    for i, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        start, stop = len(sample.prefix_ids), lengths[i]
        ids[i, :stop] = torch.tensor(sample.prefix_ids + sample.ids)
        response_mask[i, start:stop] = True
        loss_mask[i, start:stop] = torch.tensor(sample.trained, dtype=torch.bool)
        sampler[i, start:stop] = torch.tensor(sample.sampler_logprobs)
        for position, value in score.placed:
            rewards[i, start + position] += value

    return Experience(
        ids=ids,
        lengths=torch.tensor(lengths),
        response_mask=response_mask,
        loss_mask=loss_mask,
        rewards=rewards,
        group_ids=tuple(sample.group_id for sample in samples),
        sampler_logprobs=sampler,
        weights=_weights(samples),
        question_ids=tuple(sample.question_id for sample in samples),
        group_tokens=_group_tokens(samples),
    )


def _group_tokens(samples: Sequence[Sample]) -> Tensor:
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.group_id] = counts.get(sample.group_id, 0) + sum(sample.trained)
    return torch.tensor([counts[sample.group_id] for sample in samples])


def _weights(samples: Sequence[Sample]) -> Tensor | None:
    """None where all weights are 1: multiplying by 1 would cost a pass over every loss."""
    weights = [sample.weight for sample in samples]
    return torch.tensor(weights) if any(weight != 1 for weight in weights) else None


def prefix_groups(experience: Experience, rows: Sequence[int] | None = None) -> list[list[int]]:
    """These rows (None: all), those with the same prefix together; prefixes in the order of their first rows."""
    groups: dict[bytes, list[int]] = {}
    sizes = experience.prefix_lengths.tolist()
    for row in range(len(experience)) if rows is None else rows:
        size = sizes[row]
        groups.setdefault(experience.ids[row, :size].cpu().numpy().tobytes(), []).append(row)
    return list(groups.values())


def shared_prefixes(experience: Experience) -> list[tuple[int, list[int]]]:
    """Tokens of each different prefix, and the rows that begin with it."""
    sizes = experience.prefix_lengths.tolist()
    return [(sizes[rows[0]], rows) for rows in prefix_groups(experience)]


def minibatches(num_rows: int, count: int, seed: str) -> list[list[int]]:
    """A seeded partition of the rows into `count` mini-batches whose sizes differ by at most one."""
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    count = min(count, num_rows)
    return [order[i::count] for i in range(count)]


def microbatches(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Batches of rows of similar length, each at most `max_tokens` tokens with its padding; a longer row is alone.

    >>> microbatches([2, 9, 3, 8], [0, 1, 2, 3], 18)
    [[0, 2], [3, 1]]
    """
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda r: (lengths[r], r)):
        if (
            not batches
            or (len(batches[-1]) + 1) * lengths[row] > max_tokens
            or lengths[row] > 2 * lengths[batches[-1][0]]
        ):
            batches.append([])
        batches[-1].append(row)
    return batches


def question_minibatches(experience: Experience, count: int, seed: str) -> list[list[int]]:
    """A seeded partition of the questions into `count` mini-batches, each with all rows of its questions."""
    rows_of: dict[str, list[int]] = {}
    for row, question in enumerate(experience.question_ids):
        rows_of.setdefault(question, []).append(row)
    questions = list(rows_of.values())
    parts = minibatches(len(questions), count, seed)
    return [[row for number in part for row in questions[number]] for part in parts]


def shared_microbatches(
    experience: Experience, rows: Sequence[int], max_tokens: int, longest: bool = False
) -> list[list[int]]:
    """Micro-batches of these rows, in which a prefix is read once for all its samples; see `shared_minibatches`."""
    if longest:
        return _longest_microbatches(experience, rows, max_tokens)
    return _shared_microbatches(experience, prefix_groups(experience, rows), max_tokens)


def shared_minibatches(
    experience: Experience, count: int, max_tokens: int, seed: str, longest: bool = False
) -> list[list[list[int]]]:
    """Mini-batches of micro-batches, for an engine that reads a prefix once for all samples of a micro-batch.

    Samples of one prefix are in one mini-batch, so there are at most as many mini-batches as prefixes. They share a
    micro-batch too, as far as it has room.

    Args:
        experience: of a step.
        count: mini-batches.
        max_tokens: of a micro-batch, what is read once counted once; a longer sample is alone.
        seed: of the partition.
        longest: every common beginning of samples is read once, not their prefixes alone.
    """
    groups = prefix_groups(experience)
    parts = [[row for number in part for row in groups[number]] for part in minibatches(len(groups), count, seed)]
    return [shared_microbatches(experience, rows, max_tokens, longest) for rows in parts]


def _longest_microbatches(experience: Experience, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill one micro-batch after another in the order of the texts: what a row adds is what the row before lacks."""
    lengths = experience.lengths.tolist()
    texts = {row: experience.ids[row, : lengths[row]].tolist() for row in rows}
    batches: list[list[int]] = []
    before: list[int] = []
    room = 0
    for row in sorted(rows, key=lambda r: (texts[r], r)):
        added = len(texts[row]) - _common(before, texts[row])
        if not batches or added > room:
            batches.append([])
            added, room = len(texts[row]), max_tokens
        batches[-1].append(row)
        before = texts[row]
        room -= added
    return batches


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _shared_microbatches(experience: Experience, groups: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Fill one micro-batch after another with these groups; one that is full goes on with the prefix read again."""
    prefixes, lengths = experience.prefix_lengths.tolist(), experience.lengths.tolist()
    batches: list[list[int]] = []
    room = 0
    for group in groups:
        prefix = prefixes[group[0]]
        room -= prefix
        for row in group:
            own = lengths[row] - prefix
            if not batches or own > room:
                batches.append([])
                room = max_tokens - prefix
            batches[-1].append(row)
            room -= own
    return batches
