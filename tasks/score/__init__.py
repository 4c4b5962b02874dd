"""What a method's rewards give to recorded trajectories, without training: `make score`.

The rewards are called as in training (`tasks.train.scoring`), with the questions that stage `inputs` would give them
and the services that the method names. The policy plays nothing, so a reward that asks the policy itself is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.parts import kind_of
from tasks.rewards import Reward, total
from tasks.rl.experience import collate
from tasks.rl.filters import share_with_signal
from tasks.rl.method import Method
from tasks.rl.samples import whole_trajectories
from tasks.score.read import Played
from tasks.services import Services
from tasks.train.scoring import scores_by_reward
from tasks.types import Scores


@dataclass(frozen=True)
class Scored:
    """One trajectory with what it was given.

    Attributes:
        played: as it was recorded.
        by_reward: kind of a reward -> its scores.
        total: all of them together, as training takes them.
        advantages: one per response token; None where nothing stands beside it to compare it with, or where the
            advantage needs a model.
        is_kept: whether the method's filter would train on it.
    """

    played: Played
    by_reward: Mapping[str, Scores]
    total: Scores
    advantages: tuple[float, ...] | None
    is_kept: bool


def score(method: Method, played: Sequence[Played], services: Services) -> list[Scored]:
    """The scores of these trajectories, in order.

    Raises:
        ValueError: see `scores_by_reward`.
        ServiceError: a service cannot answer now.
    """
    trajectories, questions = [one.trajectory for one in played], [one.question for one in played]
    given = scores_by_reward(method.rewards, trajectories, questions, services)
    kinds = [kind_of(reward) for reward in method.rewards]
    totals = [total(scores) for scores in zip(*given, strict=True)]
    kept = set(method.filter.keep(whole_trajectories(trajectories), totals))
    advantages = _advantages(method, played, totals)
    return [
        Scored(one, dict(zip(kinds, scores, strict=True)), whole, advantage, number in kept)
        for number, (one, *scores, whole, advantage) in enumerate(zip(played, *given, totals, advantages, strict=True))
    ]


def _advantages(method: Method, played: Sequence[Played], totals: Sequence[Scores]) -> list[tuple[float, ...] | None]:
    """The advantage of each trajectory's tokens, where the method's advantage follows from the rewards of a group."""
    advantage = method.advantage
    samples = whole_trajectories([one.trajectory for one in played])
    if not samples or advantage.needs_values or advantage.needs_reference or advantage.needs_old_logprobs:
        return [None] * len(played)
    experience = advantage(collate(samples, totals))
    assert experience.advantages is not None
    sizes = [sum(other.group_id == one.group_id for other in samples) for one in samples]
    found: list[tuple[float, ...] | None] = []
    for row, (sample, size) in enumerate(zip(samples, sizes, strict=True)):
        tokens = experience.advantages[row, : len(sample.ids)].tolist()
        found.append(None if advantage.compares_group and size < 2 else tuple(tokens))
    return found


@dataclass(frozen=True)
class Column:
    """What one reward, or all together, gave to all trajectories.

    Attributes:
        mean, least, most: of the sum that a trajectory was given.
        nonzero: share of trajectories that were given something else than 0.
    """

    mean: float
    nonzero: float
    least: float
    most: float


def columns(scored: Sequence[Scored]) -> dict[str, Column]:
    """Kind of a reward, and `total` -> what it gave; empty without trajectories."""
    if not scored:
        return {}
    given = {kind: [placed(one.by_reward[kind]) for one in scored] for kind in scored[0].by_reward}
    given["total"] = [placed(one.total) for one in scored]
    return {
        kind: Column(sum(all_) / len(all_), sum(value != 0 for value in all_) / len(all_), min(all_), max(all_))
        for kind, all_ in given.items()
    }


def placed(scores: Scores) -> float:
    """The sum of what a reward placed on tokens; an outcome that could be placed nowhere counts as well."""
    return sum(value for _, value in scores.placed) if scores.placed else scores.outcome


def signal(scored: Sequence[Scored]) -> tuple[int, float]:
    """Number of groups of two and more, and the share of them whose outcomes differ."""
    samples = whole_trajectories([one.played.trajectory for one in scored])
    ids = [sample.group_id for sample in samples]
    grouped = [number for number, name in enumerate(ids) if ids.count(name) > 1]
    share = share_with_signal([samples[i] for i in grouped], [scored[i].total for i in grouped])
    return len({ids[i] for i in grouped}), share


def refused(rewards: Sequence[Reward], method: Method) -> str | None:
    """Why a method's rewards cannot be seen without training; None where they can."""
    for reward in rewards:
        for role in reward.services:
            if method.services[role].needs_reference:
                return (
                    f"rewards: {kind_of(reward)}: it asks {role} of the policy under training, so it can only be seen "
                    "there. Run `make smoke METHODS=<the method> SEEDS=0`; the report shows its rewards."
                )
    return None
