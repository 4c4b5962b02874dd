"""Potential-based shaping: a turn earns what it added to a potential, whatever the potential is.

The differences telescope: their sum is the potential at the end minus the potential at the start, so that searching
on and on cannot earn more than that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tasks.rewards import on_turns
from tasks.types import Scores, Trajectory, Turn


def potential_differences(potentials: Sequence[float]) -> list[float]:
    """Phi_t - Phi_{t-1} for t = 1, 2, ...; gamma is 1.

    PiCA Eq. 6 (arXiv 2605.09287; docs/methods/pica.md)

    >>> potential_differences([-3.0, -1.0, -1.5])
    [2.0, -0.5]
    """
    return [after - before for before, after in itertools.pairwise(potentials)]


def observed_turns(trajectory: Trajectory) -> list[Turn]:
    """The turns that caused an observation; after any other turn the policy has read nothing new."""
    return [turn for turn in trajectory.turns if turn.observation_end > turn.end]


def on_observed_turns(trajectory: Trajectory, potentials: Sequence[float], scale: float) -> Scores:
    """scale * (Phi_t - Phi_{t-1}) on the last token of the t-th turn that caused an observation.

    `potentials`: one before the first turn, and one after each turn that caused an observation.
    """
    numbers = [i for i, turn in enumerate(trajectory.turns) if turn.observation_end > turn.end]
    gains = zip(numbers, potential_differences(potentials), strict=True)
    values = {number: scale * gain for number, gain in gains}
    return on_turns(trajectory, values, potential=potentials[-1] - potentials[0])
