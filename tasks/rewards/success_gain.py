"""PiCA's step reward: by how much a turn raised the probability of a right answer, as a reward model sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field as Bound

from tasks.conf import Share, require
from tasks.rewards import Field, on_turns
from tasks.rewards.shaping import potential_differences
from tasks.rewards.success import num_missing, probabilities
from tasks.services import NO_SERVICES, Head, Probabilities, Role, Services
from tasks.types import Note, Question, Scores, Trajectory


@dataclass(frozen=True)
class SuccessGain:
    """scale * (log f(t) - log f(t-1)) on the last token of turn t.

    PiCA Eq. 7, Eq. 12 (arXiv 2605.09287; docs/methods/pica.md)

    f stays in [clamp, 1 - clamp] and a gain in [-limit, limit], because f near 0 would make any reward. A turn without
    a score earns 0 and is counted; the next gain is then taken from the last turn that has one, so that the sum still
    is log f(T) - log f(0).

    Attributes:
        scale: s; 0.3 in PiCA's Table 5.
        keep_final: whether the last turn earns its gain, too. A reward model is trained to say there whether the answer
            is right, which the outcome's reward says better.
        clamp, limit: see above.
        max_missing_share: largest share of the searches of a step that may have no score; more end the run.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("reward_model",)
    head: ClassVar[Head] = "success"
    components: ClassVar[tuple[str, ...]] = ("success_gain", "missing_scores", "start_success")

    scale: float
    keep_final: bool = False
    clamp: Annotated[float, Bound(gt=0, lt=0.5)] = 1e-4
    limit: Annotated[float, Bound(gt=0)] = 1.0
    max_missing_share: Share = 0.5

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "0 or more")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; raises as `probabilities`."""
        found = probabilities(services, trajectories, questions, self.max_missing_share)
        return [self._placed(t, one) for t, one in zip(trajectories, found, strict=True)]

    def _placed(self, trajectory: Trajectory, found: Probabilities) -> Scores:
        gains = self.gains(found)
        if not self.keep_final:
            gains.pop(_final(trajectory), None)
        earned = {number: self.scale * gain for number, gain in gains.items()}
        scores = on_turns(
            trajectory,
            earned,
            success_gain=sum(gains.values()),
            missing_scores=float(num_missing(trajectory, found)),
            start_success=found.before,
        )
        return replace(scores, notes=_notes("f(t)", found))

    def gains(self, found: Probabilities) -> dict[int, float]:
        """Turn -> its gain within `limit`, of all turns that have a score."""
        scored = {number: f for number, f in enumerate(found.after) if f is not None}
        logs = [math.log(min(max(f, self.clamp), 1 - self.clamp)) for f in (found.before, *scored.values())]
        cut = [min(max(gain, -self.limit), self.limit) for gain in potential_differences(logs)]
        return dict(zip(scored, cut, strict=True))


def _notes(name: str, found: Probabilities) -> tuple[Note, ...]:
    """The curve of the model's probabilities over the turns; -1 is the question."""
    values = [(-1, found.before), *enumerate(found.after)]
    return tuple(Note(turn, name, value) for turn, value in values if value is not None)


def _final(trajectory: Trajectory) -> int:
    """Number of the last turn if it searched nothing, so that f(T) was read there; else -1."""
    last = len(trajectory.turns) - 1
    return last if last >= 0 and not trajectory.turns[last].executed else -1


PART = SuccessGain
