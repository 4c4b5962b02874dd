"""Whether a generator computes what the policy computes, told from log-probabilities of a few fixed texts.

A hand-over that was dropped, cut off or mixed up in silence would make all samples off-policy. The comparison finds it,
and `Sent` names the weights that may be the reason. Nothing here loads or moves weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tasks.generate import Weights
from tasks.model import read_weights
from tasks.store import read_json

LENGTHS = (7, 48)
"""Tokens of each probe."""
_MOST_NAMED = 5
Checksum = tuple[int, float]


def probes(folder: Path) -> list[list[int]]:
    """Fixed pseudo-random ids from the vocabulary of a model folder.

    They are many, so that many rows of embedding and output head take part in the comparison.
    """
    settings = read_json(folder / "config.json")
    size = settings.get("text_config", settings)["vocab_size"]  # Of a model that also reads pictures.
    return [[_number(length, place) % size for place in range(length)] for length in LENGTHS]


def largest_gap(computed: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Largest distance of a log-probability from the expected one; infinite if one is not a number."""
    gaps = [
        abs(logprob - reference)
        for logprobs, references in zip(computed, expected, strict=True)
        for logprob, reference in zip(logprobs, references, strict=True)
    ]
    # max() alone could drop a nan, which must count as a gap.
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


class Sent:
    """Remembers a checksum of each weight, so that a failed proof can name the weights that did not change.

    Args:
        folder: of the policy that a generator holds before the first hand-over.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[str, Checksum] | None = None
        self._newest: dict[str, Checksum] | None = None

    def noted(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass these weights on."""
        checksums: dict[str, Checksum] = {}
        for name, tensor in weights:
            checksums[name] = _checksum(tensor)
            yield name, tensor
        self._newest = checksums

    def proved(self) -> None:
        """The generator has proved the weights that were passed on."""
        self._before = self._newest

    def unchanged(self) -> str:
        """A sentence for an error message, empty if nothing was handed over yet."""
        if self._newest is None:
            return ""
        before = self._before
        if before is None:
            before = {name: _checksum(tensor) for name, tensor in read_weights(self._folder)}
        names = [name for name, checksum in self._newest.items() if before.get(name) == checksum]
        if not names:
            return " All weights have changed since the last proof."
        more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
        return f" Unchanged since the last proof: {', '.join(names[:_MOST_NAMED])}{more}."


def _checksum(tensor: Tensor) -> Checksum:
    """Two numbers that are cheap on any device. The first alone misses values that come an even number of times."""
    bits = torch.hash_tensor(tensor.detach()).view(torch.int64)  # Python takes no unsigned ones.
    return int(bits), float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _number(*values: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:4], "big")
