"""Turn rewards by rules (MT-PPO): was the call valid, and did a search return a gold answer?

Its own paper is known to us in outline only; the values are settings. The retrieval reward is paid once a
trajectory and a valid call earns nothing by itself, so that searching on and on pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_turns
from tasks.types import Hit, Question, Scores, Trajectory


@dataclass(frozen=True)
class TurnRules(EachReward):
    """Rewards on the last token of each turn.

    MT-PPO Abstract (arXiv 2505.11821; docs/methods/mt_ppo.md)

    Attributes:
        retrieval: for the first search whose documents hold a gold answer (normalised, whole words).
        invalid: for a turn without a valid action, negative.
    """

    components: ClassVar[tuple[str, ...]] = ("answer_retrieved",)

    retrieval: float
    invalid: float

    def __post_init__(self) -> None:
        require(self.retrieval >= 0, "retrieval", self.retrieval, "0 or more")
        require(self.invalid <= 0, "invalid", self.invalid, "0 or less: a call that cannot be read earns nothing")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        values = {i: self.invalid for i, turn in enumerate(trajectory.turns) if turn.action.kind == "invalid"}
        first = next((i for i, turn in enumerate(trajectory.turns) if _shows(turn.hits, question)), None)
        if first is not None:
            values[first] = self.retrieval
        return on_turns(trajectory, values, answer_retrieved=float(first is not None))


def _shows(hits: Sequence[Hit], question: Question) -> bool:
    """Whether the documents contain a gold answer as whole words, so that "no" is not found in "Norway"."""
    golds = [f" {gold} " for gold in map(text.normalize, question.answers) if gold]
    return any(gold in f" {text.normalize(f'{hit.title} {hit.text}')} " for hit in hits for gold in golds)


PART = TurnRules
