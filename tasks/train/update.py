"""The updates of a step: samples become an experience, and its mini-batches update the policy and the critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tasks.clock import Clock
from tasks.engine import Critic, Objective, Plan, Policy, Update
from tasks.flops import Trained
from tasks.records.work import Work
from tasks.rl.experience import (
    Experience,
    collate,
    microbatches,
    minibatches,
    question_minibatches,
    shared_microbatches,
    shared_minibatches,
)
from tasks.rl.losses import Normalizer
from tasks.rl.method import Method
from tasks.train.reads import read_by
from tasks.train.settings import TrainConf
from tasks.types import Sample, Scores


@dataclass(frozen=True)
class Learner:
    """The updates of one run.

    Attributes:
        conf, method: sizes of mini-batches and micro-batches, and the loss.
        policy, critic: engines; the critic is None where the method needs none.
        plays_own_weights: the generator uses the policy's weights in memory instead of a copy.
        seed: of the mini-batches.
        clock: counts the seconds.
        work: counts the tokens and operations of the updates.
        models: the sizes of policy and critic; None where operations are not counted.
    """

    conf: TrainConf
    method: Method
    policy: Policy
    critic: Critic | None
    plays_own_weights: bool
    seed: int
    clock: Clock = field(default_factory=Clock)
    work: Work = field(default_factory=Work)
    models: Trained | None = None

    def learn(
        self, samples: Sequence[Sample], scores: Sequence[Scores], step: int
    ) -> tuple[Experience, dict[str, float]]:
        """Do all updates of one step; returns the experience with its advantages, and the metrics.

        Raises:
            DivergedError: a gradient is not finite.
        """
        experience = collate(samples, scores)
        if not self._leaves_out_equal_groups:
            return self._learn(experience, step)

        everything = self.method.advantage(experience)
        rows = unequal_groups(everything)
        if not rows:
            return everything, {"learned_share": 0.0, "skipped_update": 1.0}
        _, metrics = self._learn(experience.rows(rows), step)
        return everything, metrics | {"learned_share": len(rows) / len(everything)}

    def _learn(self, experience: Experience, step: int) -> tuple[Experience, dict[str, float]]:
        plan = self._plan(experience, step)
        with self.clock("logprobs"):
            experience = self._prepare(experience, plan)
        before = self.clock.seconds["learn"]
        with self.clock("learn"):
            metrics = self._update(experience, plan)
        self._count(experience, plan, self.clock.seconds["learn"] - before)
        if self.method.sampler.has_logprobs and not self.method.sampler.from_start:
            metrics = self._generator_gap(experience, plan) | metrics
        return experience, metrics

    def _count(self, experience: Experience, plan: Sequence[Plan], seconds: float) -> None:
        """Count what the updates of a step have done."""
        read = read_by(experience, [rows for minibatch in plan for rows in minibatch], self.conf.share_prefixes)
        flop = self.models.flop(read) if self.models is not None else 0.0
        epochs = self.conf.epochs
        self.work.add(
            Work(trained=epochs * read.predicted, read=epochs * read.positions, flop=epochs * flop, learn_s=seconds)
        )

    @property
    def _leaves_out_equal_groups(self) -> bool:
        """See `TrainConf.groups`; only advantages that follow from rewards alone are known before forward passes."""
        advantage = self.method.advantage
        needs_passes = advantage.needs_values or advantage.needs_old_logprobs or advantage.needs_reference
        return self.conf.groups == "unequal" and advantage.compares_group and not needs_passes

    def _plan(self, experience: Experience, step: int) -> list[Plan]:
        """The mini-batches of a step, each divided into micro-batches."""
        count, max_tokens, seed = self.conf.minibatches, self.conf.max_batch_tokens, f"{self.seed}/minibatch/{step}"
        if self.conf.minibatches_of == "questions":
            return [self._microbatches(experience, rows) for rows in question_minibatches(experience, count, seed)]
        if self.conf.share_prefixes:
            return list(shared_minibatches(experience, count, max_tokens, seed, self._shares_longest))
        lengths = experience.lengths.tolist()
        return [microbatches(lengths, rows, max_tokens) for rows in minibatches(len(experience), count, seed)]

    def _microbatches(self, experience: Experience, rows: Sequence[int]) -> Plan:
        """Micro-batches of a mini-batch."""
        if self.conf.share_prefixes:
            return shared_microbatches(experience, rows, self.conf.max_batch_tokens, self._shares_longest)
        return microbatches(experience.lengths.tolist(), rows, self.conf.max_batch_tokens)

    @property
    def _shares_longest(self) -> bool:
        return self.conf.share_prefixes == "longest"

    def _prepare(self, experience: Experience, plan: Sequence[Plan]) -> Experience:
        """Add old (and reference) logprobs, values and advantages.

        Old logprobs are computed on the same micro-batches as the updates. Other padding would change their last bits,
        and the ratio before the first update would not be exactly 1.
        """
        everything = [rows for minibatch in plan for rows in minibatch]
        if self._takes_sampler_logprobs:
            old = experience.sampler_logprobs.clone()
        else:
            later = [rows for minibatch in plan[1:] for rows in minibatch]
            old = self.policy.logprobs(experience, later if self._reuses_first_forward else everything)

        ref = self.policy.logprobs(experience, everything, reference=True) if self.method.needs_reference else None
        values = self.critic.values(experience, everything) if self.critic is not None else None
        return self.method.advantage(replace(experience, old_logprobs=old, ref_logprobs=ref, values=values))

    @property
    def _reuses_first_forward(self) -> bool:
        """Whether the first update's forward pass gives its old logprobs; valid if no advantage reads them before."""
        return not self.method.advantage.needs_old_logprobs

    @property
    def _takes_sampler_logprobs(self) -> bool:
        """See `TrainConf.old_logprobs`."""
        is_trusted = self.plays_own_weights and self.method.sampler.has_logprobs
        return self.conf.old_logprobs == "sampler" and is_trusted and self._reuses_first_forward

    def _update(self, experience: Experience, plan: Sequence[Plan]) -> dict[str, float]:
        """All epochs over all mini-batches; means of the metrics over the updates."""
        sums: dict[str, float] = {}
        norms: list[float] = []
        value_norms: list[float] = []
        for epoch in range(self.conf.epochs):
            for number, minibatch in enumerate(plan):
                is_first = epoch == number == 0 and self._reuses_first_forward
                norms.append(_add(sums, self._update_policy(experience, minibatch, is_first)))
                if self.critic is not None:
                    value_norms.append(_add(sums, self._update_critic(self.critic, experience, minibatch)))

        updates = len(norms)
        metrics = {name: value / updates for name, value in sums.items()}
        metrics["grad_norm"] = sum(norms) / updates
        if value_norms:
            metrics["value_grad_norm"] = sum(value_norms) / updates
        return metrics

    def _update_policy(self, experience: Experience, minibatch: Plan, is_first: bool) -> Update:
        """One update of the policy. The first one writes its logprobs into the experience as old logprobs."""
        rows = [row for microbatch in minibatch for row in microbatch]
        loss = self.method.loss
        questions = [experience.question_ids[row] for row in rows]
        normalizer = Normalizer.of(experience.loss_mask[rows], questions)
        objective = Objective(loss, normalizer, loss.needs_entropy_gradient, is_first)
        update = self.policy.update(experience, minibatch, objective)
        if update.logprobs is not None:
            assert experience.old_logprobs is not None
            experience.old_logprobs[rows] = update.logprobs[rows]
        return update

    def _update_critic(self, critic: Critic, experience: Experience, minibatch: Plan) -> Update:
        value_loss = self.method.value_loss
        assert value_loss is not None
        rows = [row for microbatch in minibatch for row in microbatch]
        normalizer = Normalizer.of(value_loss.mask(experience.rows(rows)))
        return critic.update(experience, minibatch, Objective(value_loss, normalizer))

    def _generator_gap(self, experience: Experience, plan: Sequence[Plan]) -> dict[str, float]:
        """Mean and largest distance between the generator's logprobs and the trainer's."""
        assert experience.old_logprobs is not None
        # If the old logprobs are the generator's, only the first update wrote the trainer's own over them.
        computed = plan[:1] if self._takes_sampler_logprobs else plan
        rows = [row for minibatch in computed for microbatch in minibatch for row in microbatch]
        gap = (experience.old_logprobs - experience.sampler_logprobs)[rows][experience.loss_mask[rows]].abs()
        return {"logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def unequal_groups(experience: Experience) -> list[int]:
    """Numbers of the samples in whose group some advantage is not 0.

    Args:
        experience: with advantages.
    """
    assert experience.advantages is not None
    has_signal = (experience.advantages != 0).any(-1).tolist()
    groups = {group for group, one in zip(experience.group_ids, has_signal, strict=True) if one}
    return [row for row, group in enumerate(experience.group_ids) if group in groups]


def _add(sums: dict[str, float], update: Update) -> float:
    """Add the metrics of the micro-batches in order; another order would change the last bits of the sums.

    Returns the norm of the update's gradient.
    """
    for metrics in update.metrics:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return update.grad_norm
