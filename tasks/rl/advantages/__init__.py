"""How much better than expected, one file for each kind of comparison."""

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

        All must then exist before the first update. Otherwise the first mini-batch's are taken from its own update,
        whose ratio is then exactly 1.
        """
        ...

    @property
    def compares_group(self) -> bool:
        """Whether the members of a group are compared, which says nothing where there is one or all are alike."""
        ...

    def __call__(self, experience: Experience) -> Experience: ...
