"""A sampler that draws candidates for the next turn: forked from one prefix, scored while playing, the best goes on.

No paper: the smallest sampler that forks rows. Put into `tasks/rl/samplers/` it can be named in `conf/method/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks.agent.rollout import Player
from tasks.agent.row import Row
from tasks.conf import require
from tasks.generate import Sampling
from tasks.rl.samplers import Draw, Score
from tasks.rl.samples import sample_from, scores_from
from tasks.types import Question, Sample, Scores


@dataclass(frozen=True)
class Candidates:
    """Plays each question turn by turn: `size` candidates from one prefix, of which the best by its score goes on.

    A sample is a candidate's own turn; candidates for one turn of one question are a group.

    Attributes:
        size: candidates for a turn.
        weight: of every sample in the loss.
    """

    from_start: ClassVar[bool] = False
    has_logprobs: ClassVar[bool] = True

    size: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(self.size >= 2, "size", self.size, "at least 2, which are compared")
        require(self.weight > 0, "weight", self.weight, "above 0")

    def draw(self, player: Player, questions: Sequence[Question], sampling: Sampling, score: Score) -> Draw:
        """See `Sampler`."""
        lines = player.start(questions, 1, sampling)
        samples: list[Sample] = []
        scores: list[Scores] = []
        owners: list[int | None] = []
        while playing := [number for number, line in enumerate(lines) if not line.is_over]:
            families = [player.fork(lines[number], self.size) for number in playing]
            candidates = [candidate for family in families for candidate in family]
            actions = dict(zip((c.number for c in candidates), player.act(candidates), strict=True))
            written = [candidate.trajectory() for candidate in candidates]
            found = iter(zip(written, score(written, [c.question for c in candidates]), strict=True))

            for number, family in zip(playing, families, strict=True):
                prefix = lines[number]
                scored = [next(found) for _ in family]
                best = max(range(self.size), key=lambda i: scored[i][1].outcome)
                for i, (trajectory, value) in enumerate(scored):
                    sample = sample_from(trajectory, len(prefix.response), group_of(prefix), self.weight)
                    if any(sample.trained):  # Not one that ended its text at once.
                        samples.append(sample)
                        scores.append(scores_from(value, len(prefix.response)))
                        owners.append(number if i == best else None)
                lines[number] = family[best]
                player.finish([prefix, *(candidate for candidate in family if candidate is not family[best])])
            player.observe([lines[n] for n in playing], [actions[lines[n].number] for n in playing])
        return Draw(player.finish(lines), samples, scores, owners)


def group_of(prefix: Row) -> str:
    """The group of the candidates that continue this prefix."""
    return f"{prefix.group_id}/turn {len(prefix.turns)}"


PART = Candidates
