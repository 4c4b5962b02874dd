"""TIPS: what a turn added to the likelihood of the gold answer under a frozen copy of the policy.

Potential-based shaping: Phi_t is the mean log-probability of the gold answer's tokens after the trajectory up to and
with turn t's observation, and turn t earns scale * (Phi_t - Phi_{t-1}). The terms telescope, so that what searching
can earn is bounded whatever its length. Known from the method's own paper in outline only: scale is a setting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar
from tasks.rewards import NOTHING, Need, Resources, on_turns
from tasks.types import Action, Question, Scores, Trajectory, Turn


@dataclass(frozen=True)
class AnswerPotential:
    """On the last token of each turn that caused an observation.

    Attributes:
        scale: weight of the difference.
        grammar: how an answer is written.
    """

    scale: float
    grammar: SearchGrammar
    needs: tuple[Need, ...] = ("likelihood",)

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], resources: Resources = NOTHING
    ) -> list[Scores]:
        """One `Scores` per trajectory; all likelihoods are asked for in one call."""
        assert resources.likelihood is not None
        assert resources.encode is not None
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        counts = []
        for trajectory, question in zip(trajectories, questions, strict=True):
            opening, answer = self._written(question.answers[0], resources)
            ends = [0, *(turn.observation_end for turn in _observed(trajectory))]
            pairs += [(trajectory.prompt_ids + trajectory.response_ids[:end] + opening, answer) for end in ends]
            counts.append(len(ends))
        found = iter(resources.likelihood(pairs))
        scores = []
        for trajectory, count in zip(trajectories, counts, strict=True):
            potentials = [next(found) for _ in range(count)]
            numbers = [i for i, turn in enumerate(trajectory.turns) if turn.observation_end > turn.end]
            gains = [after - before for before, after in itertools.pairwise(potentials)]
            values = {number: self.scale * gain for number, gain in zip(numbers, gains, strict=True)}
            scores.append(on_turns(trajectory, values, potential=potentials[-1] - potentials[0]))
        return scores

    def _written(self, answer: str, resources: Resources) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of what opens an answer, and of the answer itself; encoded apart, so that the border is a token's."""
        assert resources.encode is not None
        opening, _, _ = self.grammar.render(Action("answer", "\0")).partition("\0")
        return tuple(resources.encode(opening.rstrip())), tuple(resources.encode(f" {answer.strip()}"))


def _observed(trajectory: Trajectory) -> list[Turn]:
    return [turn for turn in trajectory.turns if turn.observation_end > turn.end]
