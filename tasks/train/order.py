"""Which questions a step draws, and how it draws more of them until the filter has kept enough."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tasks.agent.rollout import Player
from tasks.conf import require
from tasks.generate import Sampling
from tasks.parts import kind_of
from tasks.records.work import Work
from tasks.retrieval import RetrievalError
from tasks.rewards import total
from tasks.rl.filters import Filter
from tasks.rl.method import Method
from tasks.rl.samplers import Draw
from tasks.services import Services
from tasks.train.health import answer_metrics, rollout_metrics
from tasks.train.resume import Progress
from tasks.train.scoring import scores_by_reward
from tasks.train.settings import TrainConf
from tasks.types import Question, Sample, Scores, Trajectory

SEEDS_OF_DRAWS = 100_003
"""Distance between the seeds of draws of two runs; a run has fewer draws."""


@dataclass(frozen=True)
class Order:
    """The order of questions: every epoch has a new permutation, and each draw takes its next slice.

    Attributes:
        questions: all of them.
        count: questions of one draw, at most all.
        seed: of the permutations.
    """

    questions: Sequence[Question]
    count: int
    seed: int

    def draw(self, number: int) -> list[Question]:
        """The questions of draw `number`, which counts from 1."""
        draws_per_epoch = len(self.questions) // self.count
        epoch, place = divmod(number - 1, draws_per_epoch)
        order = list(range(len(self.questions)))
        random.Random(f"{self.seed}/order/{epoch}").shuffle(order)
        return [self.questions[i] for i in order[place * self.count : (place + 1) * self.count]]


@dataclass
class Rollouts:
    """Everything that was played for a step, and which samples the filter kept.

    Attributes:
        trajectories: of all draws.
        samples, scores, owners: of all draws, one entry per sample; see `Draw`.
        drawn: one entry per sample: the number of its draw and the id of its question. A question that comes again in a
            later draw counts again.
        kept: indices of the samples that the filter kept.
        questions: by id.
        num_played, num_failed: counts of trajectories, lost ones included.
        num_rounds: number of draws.
        work: the tokens of play, and its seconds.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)
    drawn: list[tuple[int, str]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    questions: dict[str, Question] = field(default_factory=dict)
    num_played: int = 0
    num_failed: int = 0
    num_rounds: int = 0
    work: Work = field(default_factory=Work)

    @property
    def kept_questions(self) -> list[tuple[int, str]]:
        """The questions with a kept sample, in order, as draw and id."""
        return list(dict.fromkeys(self.drawn[i] for i in self.kept))

    @property
    def kept_share(self) -> float:
        """Share of the groups with a kept sample."""
        kept_groups = {self.samples[i].group_id for i in self.kept}
        return len(kept_groups) / len({sample.group_id for sample in self.samples})

    def add(self, draw: Draw, questions: Sequence[Question], number: int, kept: Sequence[int]) -> None:
        """Add draw `number` of the run; `kept` are the indices of the samples that the filter kept."""
        first_sample, first_trajectory = len(self.samples), len(self.trajectories)
        self.kept += [first_sample + i for i in kept]
        self.trajectories += draw.trajectories
        self.samples += draw.samples
        self.scores += draw.scores
        self.owners += [None if owner is None else first_trajectory + owner for owner in draw.owners]
        self.drawn += [(number, sample.question_id) for sample in draw.samples]
        self.questions |= {question.id: question for question in questions}
        self.num_played += draw.num_played
        self.num_failed += draw.num_failed
        self.num_rounds += 1

    def of_first(self, num_questions: int) -> list[int]:
        """Indices of the kept samples of the first `num_questions` kept questions; the surplus is dropped."""
        questions = set(self.kept_questions[:num_questions])
        return [i for i in self.kept if self.drawn[i] in questions]

    def metrics(self) -> dict[str, float]:
        """Metrics of everything that was played, before the filter."""
        answers = [self.questions[t.question_id].answers for t in self.trajectories]
        metrics = answer_metrics(self.trajectories, answers)
        metrics |= rollout_metrics(self.trajectories, self.samples, self.scores, self.num_played)
        return metrics | {"failed": self.num_failed}


@dataclass(frozen=True)
class Refill:
    """Draws, plays, scores and filters until a step has enough questions.

    Attributes:
        conf, method: the batch size, and the parts that sample, score and filter.
        player: plays training questions.
        services: the services that the method's parts call.
        order: the order of questions.
        seed: of the draws.
        progress: of the run; numbers and counts the draws.
    """

    conf: TrainConf
    method: Method
    player: Player
    services: Services
    order: Order
    seed: int
    progress: Progress

    @property
    def may_repeat(self) -> bool:
        """Whether a step may draw more than once."""
        return self.method.filter.max_rounds > 1

    @property
    def fewest(self) -> int:
        """Smallest number of kept questions with which a step updates the policy.

        If all rounds of a refilling filter keep less than one mini-batch, an update would follow noise; it is skipped.
        """
        return math.ceil(self.order.count / self.conf.minibatches) if self.may_repeat else 1

    def collect(self, step: int) -> Rollouts:
        """Draw until as many questions are kept as one draw holds, or the filter allows no further draw.

        Raises:
            RetrievalError, ValueError: see `require_usable`.
        """
        clock, cost = self.player.clock, replace(self.player.cost)
        before = clock.seconds["play"]
        with clock("play"):
            rollouts = self._collect(step)

        written, prefilled = (
            getattr(self.player.cost, name) - getattr(cost, name) for name in ("generated", "prefilled")
        )
        rollouts.work = Work(written, prefilled, clock.seconds["play"] - before)
        return rollouts

    def _collect(self, step: int) -> Rollouts:
        rollouts = Rollouts()
        while rollouts.num_rounds < self.method.filter.max_rounds and len(rollouts.kept_questions) < self.order.count:
            if rollouts.num_rounds and self.conf.is_spent(self.player.cost.generated):
                break  # Without this a refilling filter would get more tokens than the other methods.
            questions = self.order.draw(self.progress.num_draws + 1)
            draw = self._play(questions)
            require_usable(draw, self.conf.max_failed_share, step)
            _require_components(draw, self.method.filter)
            kept = self.method.filter.keep(draw.samples, draw.scores)
            rollouts.add(draw, questions, self.progress.num_draws, kept)
        return rollouts

    def _play(self, questions: Sequence[Question]) -> Draw:
        """Play one draw. Its number goes into the group ids, because a question may come again in a later draw."""
        progress, method = self.progress, self.method
        progress.num_draws += 1
        number = progress.num_draws

        method.search.announce(self.services, progress.share_done(self.conf), f"{self.seed}/{number}")
        sampling = Sampling(method.temperature, method.top_p, (), seed=self.seed * SEEDS_OF_DRAWS + number)
        draw = method.sampler.draw(self.player, questions, sampling, self.score)
        _require_drawn(draw, questions)

        progress.num_trajectories += draw.num_played
        progress.num_failed += draw.num_failed
        if not self.may_repeat:
            return draw
        return replace(draw, samples=[replace(s, group_id=f"{number}/{s.group_id}") for s in draw.samples])

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
        """The method's rewards, added up; see `tasks.rl.samplers.Score`."""
        with self.player.clock("score"):
            by_reward = scores_by_reward(self.method.rewards, trajectories, questions, self.services)
        return [total(scores) for scores in zip(*by_reward, strict=True)]


def _require_components(draw: Draw, filter_: Filter) -> None:
    """Raise the ValueError for a score that lacks a component which the filter reads."""
    for number, (sample, score) in enumerate(zip(draw.samples, draw.scores, strict=True)):
        for name in filter_.components:
            where = f"filter: {kind_of(filter_)}: sample {number} (question {sample.question_id!r}): component"
            given = ", ".join(score.components) or "none"
            require(name in score.components, where, name, f"one of its score's ({given}); mend its reward or sampler")


def _require_drawn(draw: Draw, questions: Sequence[Question]) -> None:
    """Raise the ValueError for a sampler that plays or trains other questions than it was given."""
    known = {question.id for question in questions}
    played: list[Trajectory | Sample] = [*draw.trajectories, *draw.lost, *draw.samples]
    for name in (record.question_id for record in played):
        require(name in known, "the sampler's question_id", name, "that of a question it was given to play")


def require_usable(draw: Draw, max_failed_share: float, step: int) -> None:
    """Raise unless the draw can be learned from without a bias towards trajectories that search less.

    Raises:
        RetrievalError: searches failed, and nothing is left or more than `max_failed_share` is lost.
        ValueError: nothing is left, because the policy wrote nothing.
    """
    failed = [t for t in draw.lost if t.status == "failed"]
    sound = [*draw.trajectories, *(t for t in draw.lost if t.status != "failed" and t.num_generated)]
    searched = len(failed) + sum(any(turn.executed for turn in t.turns) for t in sound)

    if draw.samples and len(failed) <= max_failed_share * searched:
        return
    if not draw.num_played:
        raise ValueError(f"step {step}: the sampler played nothing, expected trajectories of the questions it gets.")
    if not failed:
        raise ValueError(f"step {step}: the policy ended all {draw.num_played} trajectories without writing a token.")
    raise RetrievalError(
        f"step {step}: {len(failed)} of {draw.num_played} trajectories failed ({failed[0].error}), "
        f"{searched - len(failed)} others searched (max_failed_share={max_failed_share:g}). Nothing was "
        f"learned from them. Mend the search and start again; the run continues where it stopped."
    )
