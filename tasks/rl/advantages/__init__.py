"""Advantages: how much better a sample was than expected, one file for each way to estimate it."""

from __future__ import annotations

from typing import Protocol

from tasks.rl.experience import Experience


class Advantage(Protocol):
    """Fills `advantages` (and `returns`, for a critic)."""

    @property
    def needs_values(self) -> bool:
        """Whether a critic must be trained."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether reference logprobs must be there."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether it reads old logprobs.

        If it does, they are computed for all samples before the first update. If not, the first update's own forward
        pass gives those of its mini-batch, which saves a pass; its ratio is exactly 1.
        """
        ...

    @property
    def compares_group(self) -> bool:
        """Whether the members of a group are compared; a group must then have two or more that can differ."""
        ...

    def __call__(self, experience: Experience) -> Experience: ...
