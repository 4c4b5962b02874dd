"""Validation on questions that are not trained on, and the best policy so far."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import text
from tasks.agent.rollout import Player
from tasks.engine import Policy
from tasks.generate import Sampling
from tasks.retrieval import RetrievalError
from tasks.types import Question


def validate(
    player: Player, questions: Sequence[Question], progress: Callable[[int], object] = lambda done: None
) -> dict[str, float]:
    """Play the validation questions greedily; nothing where there are none. `progress` gets the number played.

    Raises:
        RetrievalError: every trajectory failed.
    """
    if not questions:
        return {}
    played = player.play(questions, 1, Sampling(0.0, 1.0, (), seed=0), progress)
    # A failed search says nothing about the policy, so its trajectory counts neither as right nor as wrong.
    sound = [(t, q) for t, q in zip(played, questions, strict=True) if t.status != "failed"]
    if not sound:
        raise RetrievalError(f"validation: all {len(played)} trajectories failed ({played[0].error}). Mend the search.")
    return {
        "validation_em": sum(text.exact_match(t.answer, q.answers) for t, q in sound) / len(sound),
        "validation_f1": sum(text.f1(t.answer, q.answers) for t, q in sound) / len(sound),
        "validation_num_searches": sum(t.num_searches for t, _ in sound) / len(sound),
    }


@dataclass(frozen=True)
class BestPolicy:
    """The best policy by validation EM, of equal ones the latest; its folder is named after its step.

    Attributes:
        folder: holds one folder per candidate.
        policy: the one under training.
    """

    folder: Path
    policy: Policy

    def offer(self, step: int, em: float, history: Sequence[Mapping[str, Any]]) -> bool:
        """Save the policy of this step if it is the best of the run so far; returns whether it is."""
        before = max((row["metrics"].get("validation_em", -1.0) for row in history), default=-1.0)
        if em < before:
            return False
        self.policy.export(self.folder / str(step))
        return True

    def keep_only(self, step: int | None) -> None:
        """Delete the candidates of other steps. A checkpoint that names this step must have been written before."""
        for candidate in self.folder.glob("*"):
            if candidate.name != str(step):
                shutil.rmtree(candidate)

    def export(self, step: int, folder: Path) -> None:
        """Write the candidate of this step as a model folder."""
        shutil.copytree(self.folder / str(step), folder)
