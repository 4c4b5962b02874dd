"""The step reward of PiCA's release, whose reward model gives the chance of a first error at a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tasks.conf import Share, require
from tasks.rewards import Field, on_turns
from tasks.rewards.format import follows_search_rule
from tasks.rewards.success import num_missing, probabilities
from tasks.services import NO_SERVICES, Head, Probabilities, Role, Services
from tasks.types import Note, Question, Scores, Trajectory


@dataclass(frozen=True)
class HazardSteps:
    """scale * (1 - h(t) - baseline - penalty(t)) on the last token of each search, where the format is right.

    PiCA main_ppo.py:225 (novdream/PiCA@35b15c7; docs/methods/pica.md)

    The k-th search costs weight * growth^(k - 3) from the fourth on. A trajectory of wrong format earns no step reward.
    As in the paper's Table 5 the scale is 0.3; the release's in-place addition makes it 1.3.

    Attributes:
        scale, baseline, weight, growth: see above.
        max_missing_share: largest share of the searches of a step that may have no score; more end the run.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("reward_model",)
    head: ClassVar[Head] = "hazard"
    components: ClassVar[tuple[str, ...]] = ("hazard", "missing_scores")

    scale: float
    baseline: float
    weight: float
    growth: float
    max_missing_share: Share = 0.5

    def __post_init__(self) -> None:
        for name in ("scale", "baseline", "weight", "growth"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; raises as `probabilities`."""
        found = probabilities(services, trajectories, questions, self.max_missing_share)
        return [self._placed(t, one) for t, one in zip(trajectories, found, strict=True)]

    def _placed(self, trajectory: Trajectory, found: Probabilities) -> Scores:
        searched = [number for number, turn in enumerate(trajectory.turns) if turn.executed]
        hazards = {k: found.after[number] for k, number in enumerate(searched, 1)}

        is_right = follows_search_rule(trajectory)
        earned = {searched[k - 1]: self.value(k, h) for k, h in hazards.items() if h is not None and is_right}
        known = [h for h in hazards.values() if h is not None]
        components = {"hazard": sum(known) / len(known)} if known else {}
        scores = on_turns(trajectory, earned, missing_scores=float(num_missing(trajectory, found)), **components)
        notes = [Note(searched[k - 1], "h(t)", h) for k, h in hazards.items() if h is not None]
        return replace(scores, notes=tuple(notes))

    def value(self, search: int, hazard: float) -> float:
        """The reward of the k-th search, counted from 1."""
        penalty = self.weight * self.growth ** (search - 3) if search >= 4 else 0.0
        return self.scale * (1 - hazard - self.baseline - penalty)


PART = HazardSteps
