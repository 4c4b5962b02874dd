"""Measures the claim behind truncated sampling: comparing single actions gives advantages of smaller variance.

Complete sampling plays a question several times and compares sums of rewards; every turn of a trajectory has the same
advantage. Truncated sampling plays it once, draws candidates for every turn from the prefix that was played, and
compares the rewards of these single actions. Both get the same rewards and draw from the same policy: the prefix goes
on with the first candidate, which is an ordinary draw. Advantages are centred and not divided by their deviation, as in
the claim. The measurement has costs of its own and leaves those of training as they are.

SLATE Eq. 8, Eq. 9 (arXiv 2602.23440; docs/methods/slate.md)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tasks.agent.rollout import Player, RolloutCost
from tasks.conf import require
from tasks.generate import Sampling
from tasks.records import schema
from tasks.records.variance import VarianceRow
from tasks.rl.samplers import Score
from tasks.store import read_jsonl
from tasks.types import Question, Scores, Trajectory

VARIANCE_DRAW = 100_000
"""The number of the draw that seeds a measurement; no run has so many draws."""


@dataclass(frozen=True)
class VarianceOfAdvantages:
    """The measurements of one run, kept in a folder, so that a run that was cut does not measure other weights.

    Attributes:
        folder: of the files, one for each measured policy.
        player, score, sampling, size: see `measure`.
        count: questions that are played; 0 measures nothing.
    """

    folder: Path
    player: Player
    score: Score
    sampling: Sampling
    size: int
    count: int

    def write(self, policy: Literal["start", "trained"], questions: Sequence[Question]) -> None:
        """Measure the policy that plays now, unless that was done.

        Raises:
            ValueError: a sampler without alternatives, which have no variance.
        """
        path = self.folder / f"{policy}.jsonl"
        if not self.count or path.is_file():
            return
        require(self.size > 1, "variance_questions", self.count, "0 for a sampler of size 1, which compares nothing")
        chosen = random.Random(f"{self.sampling.seed}/variance").sample(questions, min(self.count, len(questions)))
        schema.write(path, measure(policy, self.player, self.score, chosen, self.size, self.sampling))

    def read(self) -> list[dict[str, Any]]:
        """The rows of all measurements."""
        paths = [self.folder / f"{policy}.jsonl" for policy in ("start", "trained")]
        return [row for path in paths if path.is_file() for _, row in read_jsonl(path)]


@dataclass
class _Truncated:
    """The truncated sampling of one question: squares of the advantages of each turn, and the tokens it cost."""

    squares: list[list[float]] = field(default_factory=list)
    tokens: int = 0


def measure(
    policy: Literal["start", "trained"],
    player: Player,
    score: Score,
    questions: Sequence[Question],
    size: int,
    sampling: Sampling,
) -> list[VarianceRow]:
    """Variances for each question and turn; questions whose searches fail are left out.

    Args:
        policy: which policy plays, for the rows.
        player: plays; its costs do not change.
        score: rewards of trajectories, which may be unfinished.
        questions: that are played.
        size: candidates of a turn, and trajectories of a group.
        sampling: of both.
    """
    own = replace(player, cost=RolloutCost())
    truncated = _truncated(own, score, questions, size, sampling)
    copies = 2 * size  # Enough for the tokens of truncated sampling, whose trajectory may be longer than most.
    played = own.play(questions, copies, replace(sampling, seed=sampling.seed + 1))
    rewards = _rewards_by_turn(played, questions, copies, score)

    rows: list[VarianceRow] = []
    for number, (question, own_steps) in enumerate(zip(questions, truncated, strict=True)):
        group = slice(number * copies, (number + 1) * copies)
        if own_steps.squares and all(t.status != "failed" for t in played[group]):
            rows += _rows(policy, question, own_steps, played[group], rewards[group], size)
    return rows


def _truncated(
    player: Player, score: Score, questions: Sequence[Question], size: int, sampling: Sampling
) -> list[_Truncated]:
    """Truncated sampling of each question; one whose search failed has no squares."""
    found = [_Truncated() for _ in questions]
    for batch in player.batches(len(questions), size + 1):
        rows = dict(zip(batch, player.start(questions, 1, sampling, batch), strict=True))
        while playing := [number for number, row in rows.items() if not row.is_over]:
            families = [player.fork(rows[number], size) for number in playing]
            candidates = [candidate for family in families for candidate in family]
            actions = dict(zip((c.number for c in candidates), player.act(candidates), strict=True))
            written = [candidate.trajectory() for candidate in candidates]
            scores = score(written, [candidate.question for candidate in candidates])

            for place, (number, family) in enumerate(zip(playing, families, strict=True)):
                prefix = rows[number]
                start, own = len(prefix.response), slice(place * size, (place + 1) * size)
                found[number].squares.append(_squares([_earned(one, start) for one in scores[own]]))
                found[number].tokens += sum(t.num_generated for t in written[own]) - size * sum(prefix.mask)
                rows[number] = family[0]
                player.finish([prefix, *family[1:]])
            player.observe([rows[n] for n in playing], [actions[rows[n].number] for n in playing])
        for number, row in rows.items():
            if row.status == "failed":
                found[number] = _Truncated()
    return found


def _rewards_by_turn(
    played: Sequence[Trajectory], questions: Sequence[Question], copies: int, score: Score
) -> list[list[float]]:
    """The reward of each action of each trajectory, scored right after it was written, as truncated sampling does."""
    places = [(number, turn) for number, t in enumerate(played) for turn in range(len(t.turns))]
    cut = [until(played[number], turn) for number, turn in places]
    scores = score(cut, [questions[number // copies] for number, _ in places]) if cut else []
    rewards: list[list[float]] = [[] for _ in played]
    for (number, turn), one in zip(places, scores, strict=True):
        rewards[number].append(_earned(one, played[number].turns[turn].start))
    return rewards


def until(trajectory: Trajectory, number: int) -> Trajectory:
    """The trajectory right after turn `number` (from 0) was written: that turn has no observation yet."""
    turn = trajectory.turns[number]
    written = replace(turn, observation_end=turn.end, observation="", executed=False, hits=())
    is_last = number == len(trajectory.turns) - 1
    return replace(
        trajectory,
        turns=(*trajectory.turns[:number], written),
        response_ids=trajectory.response_ids[: turn.end],
        loss_mask=trajectory.loss_mask[: turn.end],
        sampler_logprobs=trajectory.sampler_logprobs[: turn.end],
        answer=trajectory.answer if is_last else None,
        status=trajectory.status if is_last else "open",
    )


def _earned(scores: Scores, start: int) -> float:
    return sum(value for position, value in scores.placed if position >= start)


def _squares(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) ** 2 for reward in rewards]


def _rows(
    policy: Literal["start", "trained"],
    question: Question,
    truncated: _Truncated,
    played: Sequence[Trajectory],
    rewards: Sequence[Sequence[float]],
    size: int,
) -> Iterator[VarianceRow]:
    """The rows of one question."""
    group = _group_at(truncated.tokens, [trajectory.num_generated for trajectory in played])
    equal = _squares([sum(of_one) for of_one in rewards[:size]])
    at_tokens = _squares([sum(of_one) for of_one in rewards[:group]])
    num_turns = [len(of_one) for of_one in rewards]

    for turn in range(max(len(truncated.squares), *num_turns) + 1):
        own = truncated.squares[turn - 1 : turn] if turn else truncated.squares
        yield VarianceRow(
            policy=policy,
            question_id=question.id,
            turn=turn,
            truncated=_mean([square for squares in own for square in squares]),
            full=_mean([square for square, turns in zip(equal, num_turns, strict=False) if turns >= turn]),
            full_at_tokens=_mean(
                [square for square, turns in zip(at_tokens, num_turns, strict=False) if turns >= turn]
            ),
            num_turns=len(truncated.squares),
            group=group,
        )


def _group_at(tokens: int, costs: Sequence[int]) -> int:
    """How many of these trajectories, at least 2, cost at most so many tokens."""
    total, count = 0, 0
    for cost in costs:
        total += cost
        if total > tokens:
            break
        count += 1
    return max(count, 2)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
