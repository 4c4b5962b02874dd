"""Candidates for one action at a time (SLATE): forked from one prefix, scored before a search, one of them goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from tasks.agent.rollout import Player
from tasks.agent.row import Row
from tasks.conf import require
from tasks.generate import Sampling
from tasks.rl.advantages.group import group_normalized
from tasks.rl.samplers import Draw, Score
from tasks.rl.samples import sample_from, scores_from
from tasks.types import Action, Note, Question, Sample, Scores

_LEAST_ETA = 1e-6
"""Advantages divided by less could leave the range of numbers; this one takes the best candidate all the same."""


@dataclass
class _Line:
    """A question that is being played: the row of what was chosen so far, and the samples of all its steps."""

    row: Row
    has_ended: bool = False
    samples: list[Sample] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class TruncatedSteps:
    """`size` candidates for the next action of a question; one of them goes on, and its search alone is executed.

    A sample is a candidate's own action with weight 1 / size; the candidates of one step are a group. The candidate
    that goes on is drawn with probability softmax(advantage / eta), among those that search or answer. A question ends
    with an answer, after `RolloutConf.max_turns` steps, or where no candidate can go on; what its last search would
    find nobody would read, so it is not executed. A question whose search failed is lost with all its samples.

    SLATE Eq. 3, Algorithm 1 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        size: candidates of a step.
        eta: temperature of the choice; a small one takes the best candidate.
        eps: added to the deviation of the rewards that the choice compares.
    """

    from_start: ClassVar[bool] = False
    has_logprobs: ClassVar[bool] = True

    size: int
    eta: float
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require(1 <= self.size <= 1024, "size", self.size, "1 to 1024")
        require(
            self.eta >= _LEAST_ETA, "eta", self.eta, f"{_LEAST_ETA:g} or more; a small one takes the best candidate"
        )
        require(self.eps > 0, "eps", self.eps, "a small number above 0, such as 1e-6")

    def draw(self, player: Player, questions: Sequence[Question], sampling: Sampling, score: Score) -> Draw:
        """See `Sampler`."""
        lines: list[_Line] = []
        for batch in player.batches(len(questions), self.size + 1):
            started = [_Line(row) for row in player.start(questions, 1, sampling, batch)]
            for _ in range(player.conf.max_turns):
                if playing := [line for line in started if not line.has_ended]:
                    self._step(player, playing, sampling.seed, score)
            lines += started
            player.finish([line.row for line in started])
        return _draw(lines)

    def _step(self, player: Player, lines: Sequence[_Line], seed: int, score: Score) -> None:
        """One action of each of these questions."""
        families = [player.fork(line.row, self.size) for line in lines]
        candidates = [candidate for family in families for candidate in family]
        actions = dict(zip((c.number for c in candidates), player.act(candidates), strict=True))
        trajectories = [candidate.trajectory() for candidate in candidates]
        rewarded = score(trajectories, [candidate.question for candidate in candidates])

        for number, (line, family) in enumerate(zip(lines, families, strict=True)):
            prefix, start = line.row, len(line.row.response)
            own = slice(number * self.size, (number + 1) * self.size)
            samples = [sample_from(t, start, group_of(prefix), 1 / self.size) for t in trajectories[own]]
            scores = [scores_from(of_candidate, start) for of_candidate in rewarded[own]]
            chosen = self.choose(samples, scores, [actions[row.number] for row in family], seed)
            texts = [row.turns[-1].text for row in family]
            _add(line, samples, _noted(scores, texts, len(prefix.turns), chosen), chosen)

            line.row = prefix if chosen is None else family[chosen]
            line.has_ended = chosen is None or line.row.is_over or len(line.row.turns) >= player.conf.max_turns
            player.finish([row for row in (prefix, *family) if row is not line.row])

        searching = [line for line in lines if not line.has_ended]
        player.observe([line.row for line in searching], [actions[line.row.number] for line in searching])
        for line in searching:
            line.has_ended = line.row.is_over

    def choose(
        self, samples: Sequence[Sample], scores: Sequence[Scores], actions: Sequence[Action], seed: int
    ) -> int | None:
        """The candidate that goes on, None where none searches or answers; drawn from the seed and the group's id."""
        selectable = [i for i, action in enumerate(actions) if action.kind != "invalid"]
        if not selectable:
            return None

        members = _written(samples)
        rewards = torch.tensor([sum(value for _, value in scores[i].placed) for i in members], dtype=torch.double)
        compared = group_normalized(rewards, [samples[i].group_id for i in members], self.eps, "population")
        advantages = dict(zip(members, compared.tolist(), strict=True))

        chances = softmax([advantages[i] / self.eta for i in selectable])
        rng = random.Random(f"{seed}/choice/{samples[0].group_id}")
        return rng.choices(selectable, chances)[0]


def softmax(values: Sequence[float]) -> list[float]:
    """exp(value) of each over their sum."""
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    return [power / sum(powers) for power in powers]


def group_of(prefix: Row) -> str:
    """The group of the candidates that continue this prefix."""
    return f"{prefix.group_id}/step {len(prefix.turns) + 1}"


def _written(samples: Sequence[Sample]) -> list[int]:
    """Numbers of the candidates with a token; the others ended their text at once, so nothing of them is trained."""
    return [i for i, sample in enumerate(samples) if any(sample.trained)]


def _noted(scores: Sequence[Scores], texts: Sequence[str], turn: int, chosen: int | None) -> list[Scores]:
    """The scores; those of the chosen candidate also note all candidates of the step with their rewards."""
    rewards = [sum(value for _, value in one.placed) for one in scores]
    notes = tuple(
        Note(turn, "candidate", reward, text.strip(), taken=number == chosen)
        for number, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    )
    return [replace(one, notes=one.notes + notes) if i == chosen else one for i, one in enumerate(scores)]


def _add(line: _Line, samples: Sequence[Sample], scores: Sequence[Scores], chosen: int | None) -> None:
    """Keep the candidates that can be learned from; one that is left alone has nothing to be compared with."""
    written = _written(samples)
    if len(written) == 1 < len(samples):
        return
    line.samples += [samples[i] for i in written]
    line.scores += [scores[i] for i in written]
    line.taken += [i == chosen for i in written]


def _draw(lines: Sequence[_Line]) -> Draw:
    """The samples of all questions that can be learned from, by question and step."""
    kept = [line for line in lines if line.row.status != "failed" and line.samples]
    return Draw(
        trajectories=[line.row.trajectory() for line in kept],
        samples=[sample for line in kept for sample in line.samples],
        scores=[scores for line in kept for scores in line.scores],
        owners=[number if taken else None for number, line in enumerate(kept) for taken in line.taken],
        lost=[line.row.trajectory() for line in lines if not any(line is one for one in kept)],
    )


PART = TruncatedSteps
