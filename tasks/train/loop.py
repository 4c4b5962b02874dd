"""Reinforcement learning: play, score, filter, advantage, update, checkpoint. One loop for all methods.

A step is a pure function of (weights, optimizer state, step number, draws so far): questions, draws and mini-batches
are seeded by them, so k steps, a restart and N - k steps equal N steps bit for bit on a CPU. The loop knows the parts
of a method only by their protocols. It reports through `log` and never imports tracking.
"""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tasks import checkpoint, text
from tasks.agent.rollout import Player, RolloutCost
from tasks.conf import plain, require
from tasks.engine import Critic, DivergedError, Objective, OptimizerConf, Policy, Update
from tasks.generate import Generator, Sampling
from tasks.model import Dtype
from tasks.records import schema
from tasks.records.trajectories import trajectory_row
from tasks.retrieval import RetrievalError
from tasks.rewards import total
from tasks.rl.experience import Experience, collate, microbatches, minibatches
from tasks.rl.losses import Normalizer
from tasks.rl.method import Method
from tasks.rl.samplers import Draw
from tasks.services import NO_SERVICES, Services
from tasks.store import DataError, read_jsonl
from tasks.train.health import CollapseConf, answer_metrics, rollout_metrics
from tasks.types import Question, Sample, Scores, Trajectory

log = logging.getLogger(__name__)
Log = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainConf:
    """Budget and schedule of a training run (`train` in conf/scale, overridden by a method's `scales`).

    Attributes:
        num_steps: optimizer steps in the project's sense, one batch of rollouts each; at most this many.
        max_generated_tokens: the run ends with the round of rollouts that reaches so many, dropped trajectories
            included, so that methods are compared at an equal budget; 0 is no limit.
        prompts_per_step, rollouts_per_step: exactly one is given; the other follows from the group size.
        minibatches: updates per batch of rollouts.
        epochs: passes over a batch of rollouts.
        max_batch_tokens: tokens of one forward and backward, padding included.
        policy, critic: optimizers.
        old_logprobs: `trainer` computes them again before the first update; `sampler` takes those of a generator
            that plays with the trainer's own weights in memory, one forward pass less (they differ by rounding).
            A generator with a copy of its own (vLLM) is not trusted so far, and a KL penalty in the reward needs
            an exact 0 where the policy has not moved (whitening would blow rounding up): these take `trainer`.
        dtype: of forward passes.
        keep_activations: false trades time for memory.
        num_threads: torch threads (part of the result on a CPU).
        checkpoint_every, validate_every: steps; validation plays `validate_questions` greedily, 0 none.
        validate_every_tokens: validate whenever so many more tokens have been generated, instead of by steps, so that
            methods whose steps cost more are not seen less often; 0: by steps, as where nothing is generated.
        record_trajectories: per recorded step; recorded are the first, last and every `validate_every`-th.
        select: the policy a run ends with: the best by validation EM (of equal ones the latest), or the last.
        collapse: when a run is stopped as hopeless; null never.
        max_failed_share: of a step's trajectories that searched, so many may fail; what is left after more of them
            are those that searched least, and the run stops.
    """

    num_steps: int
    prompts_per_step: int | None
    rollouts_per_step: int | None
    minibatches: int
    epochs: int
    max_batch_tokens: int
    policy: OptimizerConf
    critic: OptimizerConf
    old_logprobs: Literal["trainer", "sampler"]
    dtype: Dtype
    keep_activations: bool
    num_threads: int
    checkpoint_every: int
    validate_every: int
    validate_questions: int
    record_trajectories: int
    max_generated_tokens: int = 0
    validate_every_tokens: int = 0
    select: Literal["best", "last"] = "last"
    collapse: CollapseConf | None = None
    max_failed_share: float = 0.5

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "at least 1")
        require(0 <= self.max_failed_share <= 1, "max_failed_share", self.max_failed_share, "0 to 1")
        given = (self.prompts_per_step is None) + (self.rollouts_per_step is None)
        require(given == 1, "prompts_per_step", self.prompts_per_step, "either it or rollouts_per_step, the other null")
        for name in ("minibatches", "epochs", "max_batch_tokens", "num_threads", "checkpoint_every", "validate_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("prompts_per_step", "rollouts_per_step"):
            count = getattr(self, name)
            require(count is None or count >= 1, name, count, "null or at least 1")
        for name in ("validate_questions", "validate_every_tokens", "record_trajectories", "max_generated_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 (none) or more")

    def prompts(self, group_size: int) -> int:
        """Questions per step."""
        if self.prompts_per_step is not None:
            return self.prompts_per_step
        assert self.rollouts_per_step is not None
        return max(1, self.rollouts_per_step // group_size)


@dataclass
class Progress:
    """Resume state beside tensors: what a restart continues from."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    cost: RolloutCost = field(default_factory=RolloutCost)
    num_trajectories: int = 0
    num_failed: int = 0
    num_draws: int = 0
    stopped: str | None = None
    selected_step: int | None = None

    def is_over(self, conf: TrainConf) -> bool:
        """Whether the budget is spent or the run was stopped."""
        spent = 0 < conf.max_generated_tokens <= self.cost.generated
        return self.step >= conf.num_steps or spent or self.stopped is not None

    def is_due(self, conf: TrainConf, before: int) -> bool:
        """Whether validation is due after the step before which `before` tokens had been generated."""
        every = conf.validate_every_tokens
        if every and self.cost.generated:
            return self.cost.generated // every > before // every
        return self.step % conf.validate_every == 0


@dataclass
class _Played:
    """All that was played for a step, and what of it the filter kept.

    Attributes:
        trajectories: of all draws.
        samples, scores, owners: of all draws, one entry a sample; see `Draw`.
        drawn: one entry a sample: number of its draw and id of its question. A question may come again in a later
            draw, and counts again.
        kept: numbers of the samples that the filter kept.
        questions: by id.
        num_played, num_failed: trajectories, lost ones included.
        num_rounds: draws.
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

    @property
    def kept_questions(self) -> list[tuple[int, str]]:
        """Draw and id of the questions of which a sample was kept, in order."""
        return list(dict.fromkeys(self.drawn[i] for i in self.kept))

    @property
    def kept_share(self) -> float:
        """Share of the groups of which a sample was kept."""
        kept_groups = {self.samples[i].group_id for i in self.kept}
        return len(kept_groups) / len({sample.group_id for sample in self.samples})

    def add(self, draw: Draw, number: int, kept: Sequence[int]) -> None:
        """One more draw, and which of its samples the filter kept."""
        first_sample, first_trajectory = len(self.samples), len(self.trajectories)
        self.kept += [first_sample + i for i in kept]
        self.trajectories += draw.trajectories
        self.samples += draw.samples
        self.scores += draw.scores
        self.owners += [None if owner is None else first_trajectory + owner for owner in draw.owners]
        self.drawn += [(number, sample.question_id) for sample in draw.samples]
        self.num_played += len(draw.trajectories) + len(draw.lost)
        self.num_failed += sum(t.status == "failed" for t in draw.lost)
        self.num_rounds += 1

    def of_first(self, num_questions: int) -> list[int]:
        """Numbers of the kept samples of the first so many kept questions: the surplus is dropped."""
        wanted = set(self.kept_questions[:num_questions])
        return [i for i in self.kept if self.drawn[i] in wanted]


@dataclass
class Trainer:
    """One run of one method from one start policy.

    Args:
        conf: budget.
        method: the composition.
        policy, critic: engines; the critic is None where the method needs none.
        generator: plays with the policy; shares its weights, or sleeps during an update and then takes the new ones.
        player: rollouts of training questions; its `cost` is this run's.
        validator: plays the validation questions greedily.
        questions, validation: training and validation questions.
        seed: of data order, draws and mini-batches.
        scratch: checkpoints, the best policy and recorded trajectories.
        log: receives (step, metrics).
        services: what the method's parts call, by role.
    """

    conf: TrainConf
    method: Method
    policy: Policy
    critic: Critic | None
    generator: Generator
    player: Player
    validator: Player
    questions: Sequence[Question]
    validation: Sequence[Question]
    seed: int
    scratch: Path
    log: Log
    services: Services = field(default_factory=lambda: NO_SERVICES)
    progress: Progress = field(default_factory=Progress)

    def run(self) -> Progress:
        """Train to the last step, from the newest sound checkpoint if there is one.

        Raises:
            RetrievalError: every trajectory of a step failed; the checkpoint before it is kept.
            DataError: the prompt of a training question is over its budget, or checkpoints of other settings.
            ValueError: no training question, or a policy that ends every call at once.
        """
        if not self.questions:
            raise ValueError("no question to train on: expected at least one of split 'train'. Check the data stage.")
        self.player.prompts(self.questions)  # One over its budget is found now, not amid the run.
        wanted = self.conf.prompts(self.method.sampler.size)
        if wanted > len(self.questions):
            log.warning("a step asks for %d questions, the data has %d: it takes these.", wanted, len(self.questions))
        self._resume()
        if self.progress.step == 0 and not self.progress.history:
            self._report(0, self._validate(0))
        while not self.progress.is_over(self.conf):
            self._advance(self.progress.step + 1)
        return self.progress

    def export(self, folder: Path) -> None:
        """Write the policy the run ends with (`TrainConf.select`) as a model folder."""
        if self.progress.selected_step in (None, self.progress.step):
            self.policy.export(folder)
        else:
            shutil.copytree(self._best / str(self.progress.selected_step), folder)

    def _advance(self, step: int) -> None:
        """One step with everything that is due after it."""
        progress, before = self.progress, self.progress.cost.generated
        try:
            metrics = self._step(step)
        except DivergedError as error:
            if self.conf.collapse is None:
                raise
            progress.cost = self.player.cost
            progress.stopped, metrics = str(error), {"generated_tokens_total": progress.cost.generated}
        progress.step = step
        is_validated = progress.is_due(self.conf, before) or progress.is_over(self.conf)
        if is_validated:
            metrics |= self._validate(step)
        if self.conf.collapse is not None and progress.stopped is None:
            progress.stopped = self.conf.collapse.reason([*progress.history, {"step": step, "metrics": metrics}])
        if progress.stopped is not None:
            log.warning("stopped at step %d: %s", step, progress.stopped)
            metrics |= {} if is_validated else self._validate(step)  # Where it ended belongs to its curve.
        self._report(step, metrics)
        # With a new best policy, too: a run that is cut must not know one that is not there any more.
        if step % self.conf.checkpoint_every == 0 or progress.is_over(self.conf) or progress.selected_step == step:
            self._save()

    def trajectories(self) -> list[dict[str, Any]]:
        """The recorded training trajectories, by step."""
        files = sorted((self.scratch / "trajectories").glob("*.jsonl"))
        return [row for path in files for _, row in read_jsonl(path)]

    def _step(self, step: int) -> dict[str, float]:
        wanted = min(self.conf.prompts(self.method.sampler.size), len(self.questions))
        refills = self.method.filter.max_rounds > 1
        played = self._play(step, wanted)
        metrics = self._played_metrics(played)
        fewest = math.ceil(wanted / self.conf.minibatches) if refills else 1  # dspo section 10: one mini-batch.
        is_enough = len(played.kept_questions) >= fewest
        if refills or not is_enough:
            metrics["skipped_update"] = float(not is_enough)
        if is_enough:
            rows = played.of_first(wanted)
            samples, scores = [played.samples[i] for i in rows], [played.scores[i] for i in rows]
            with self._sleeping_generator():
                experience = self._experience(samples, scores, step)
                metrics |= self._learn(experience)
            self._record(step, played, rows, experience)
        cost = self.progress.cost = self.player.cost
        return metrics | {
            "generated_tokens_total": cost.generated, "prefill_tokens_total": cost.prefilled,
            "searches_total": cost.searches,
        }  # fmt: skip

    def _play(self, step: int, wanted: int) -> _Played:
        """Draw, play, score and filter until `wanted` questions are kept or the filter's rounds are over."""
        found = _Played()
        while found.num_rounds < self.method.filter.max_rounds and len(found.kept_questions) < wanted:
            if found.num_rounds and self._is_spent():
                break  # The budget ends a step's refill, too: no method gets more tokens than another.
            questions = self._draw(self.progress.num_draws + 1)
            found.questions |= {question.id: question for question in questions}
            draw = self._sample(questions)
            self._require_usable(draw, step)
            found.add(draw, self.progress.num_draws, self.method.filter.keep(draw.samples, draw.scores))
        return found

    def _played_metrics(self, played: _Played) -> dict[str, float]:
        """Of everything that was played, before the filter."""
        golds = [played.questions[t.question_id].answers for t in played.trajectories]
        metrics = answer_metrics(played.trajectories, golds)
        metrics |= rollout_metrics(played.trajectories, played.samples, played.scores, played.num_played)
        metrics["failed"] = played.num_failed
        if self.method.filter.max_rounds > 1:
            metrics |= {"sampling_rounds": played.num_rounds, "filter_kept_share": played.kept_share}
        return metrics

    def _sample(self, questions: list[Question]) -> Draw:
        """Play one draw; group ids of later draws of a step are told apart, a question may come again."""
        progress = self.progress
        progress.num_draws += 1
        draw_seed = f"{self.seed}/{progress.num_draws}"
        self.method.search.announce(self.services, self._share_done(), draw_seed)
        sampling = Sampling(
            self.method.temperature, self.method.top_p, (), seed=self.seed * 100_003 + progress.num_draws
        )
        draw = self.method.sampler.draw(self.player, questions, sampling, self._score)
        progress.num_trajectories += len(draw.trajectories) + len(draw.lost)
        progress.num_failed += sum(t.status == "failed" for t in draw.lost)
        if self.method.filter.max_rounds > 1:
            samples = [replace(s, group_id=f"{progress.num_draws}/{s.group_id}") for s in draw.samples]
            draw = replace(draw, samples=samples)
        return draw

    def _is_spent(self) -> bool:
        return 0 < self.conf.max_generated_tokens <= self.player.cost.generated

    def _share_done(self) -> float:
        """How far the run is, by the budget that ends it first."""
        spent = self.player.cost.generated / self.conf.max_generated_tokens if self.conf.max_generated_tokens else 0.0
        return min(1.0, max(spent, self.progress.step / max(self.conf.num_steps - 1, 1)))

    def _require_usable(self, draw: Draw, step: int) -> None:
        """Whether a draw can be learned from without a bias.

        Raises:
            RetrievalError: searches failed, and nothing is left or more than `max_failed_share` is lost.
            ValueError: nothing is left, because the policy wrote nothing.
        """
        failed = [t for t in draw.lost if t.status == "failed"]
        sound = [*draw.trajectories, *(t for t in draw.lost if t.status != "failed" and t.num_generated)]
        searched = len(failed) + sum(any(turn.executed for turn in t.turns) for t in sound)
        if draw.samples and len(failed) <= self.conf.max_failed_share * searched:
            return
        num_played = len(draw.trajectories) + len(draw.lost)
        if not failed:
            raise ValueError(f"step {step}: the policy ended all {num_played} trajectories without a token of its own.")
        raise RetrievalError(
            f"step {step}: {len(failed)} of {num_played} trajectories failed ({failed[0].error}), "
            f"{searched - len(failed)} others searched (max_failed_share={self.conf.max_failed_share:g}). Nothing was "
            f"learned from them. Mend the search and start again: the run continues."
        )

    def _draw(self, number: int) -> list[Question]:
        """Draw `number`'s questions: consecutive slices of a permutation that is new in every epoch."""
        count = min(self.conf.prompts(self.method.sampler.size), len(self.questions))
        per_epoch = len(self.questions) // count
        epoch, place = divmod(number - 1, per_epoch)
        order = list(range(len(self.questions)))
        random.Random(f"{self.seed}/order/{epoch}").shuffle(order)
        return [self.questions[i] for i in order[place * count : (place + 1) * count]]

    def _score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
        by_reward = [reward(trajectories, questions, self.services) for reward in self.method.rewards]
        return [total(scores) for scores in zip(*by_reward, strict=True)]

    def _experience(self, samples: Sequence[Sample], scores: Sequence[Scores], step: int) -> Experience:
        """Tensors of a step, with old (and reference) logprobs, values and advantages.

        Old logprobs are computed on the very micro-batches the update uses: before the first update the
        ratio is then exactly 1. The first mini-batch's come from its own update where `_own_old_logprobs`.
        """
        experience = collate(samples, scores)
        self._plan = [
            microbatches(experience.lengths.tolist(), rows, self.conf.max_batch_tokens)
            for rows in minibatches(len(experience), self.conf.minibatches, f"{self.seed}/minibatch/{step}")
        ]
        everything = [rows for mini in self._plan for rows in mini]
        if self._takes_sampler:
            old = experience.sampler_logprobs.clone()
        else:
            later = [rows for mini in self._plan[1:] for rows in mini]
            old = self.policy.logprobs(experience, later if self._own_old_logprobs else everything)
        needs_reference, critic = self.method.needs_reference, self.critic
        ref = self.policy.logprobs(experience, everything, reference=True) if needs_reference else None
        values = critic.values(experience, everything) if critic is not None else None
        experience = replace(experience, old_logprobs=old, ref_logprobs=ref, values=values)
        return self.method.advantage(experience)

    @property
    def _takes_sampler(self) -> bool:
        shares = self.player.generator.shares_weights and self.method.sampler.has_logprobs
        return self.conf.old_logprobs == "sampler" and shares and self._own_old_logprobs

    @property
    def _own_old_logprobs(self) -> bool:
        """Whether the first mini-batch's old logprobs come from its own update: nothing reads them before it."""
        return not self.method.advantage.needs_old_logprobs

    def _learn(self, experience: Experience) -> dict[str, float]:
        sums: dict[str, float] = {}
        norms, value_norms = [], []
        for epoch in range(self.conf.epochs):
            for number, mini in enumerate(self._plan):
                is_first = epoch == number == 0 and self._own_old_logprobs
                norms.append(self._update_policy(experience, mini, sums, is_first))
                if self.critic is not None:
                    value_norms.append(self._update_critic(self.critic, experience, mini, sums))
        updates = len(norms)
        sampler = self.method.sampler
        metrics = self._gap(experience) if sampler.has_logprobs and not sampler.from_start else {}
        metrics |= {name: value / updates for name, value in sums.items()}
        metrics["grad_norm"] = sum(norms) / updates
        if value_norms:
            metrics["value_grad_norm"] = sum(value_norms) / updates
        return metrics

    def _gap(self, experience: Experience) -> dict[str, float]:
        """How far the generator's logprobs are from the trainer's."""
        assert experience.old_logprobs is not None
        # Where old logprobs are the generator's, only the first mini-batch was computed by both.
        both = [r for mini in self._plan[: 1 if self._takes_sampler else None] for m in mini for r in m]
        gap = (experience.old_logprobs - experience.sampler_logprobs)[both][experience.loss_mask[both]].abs()
        return {"logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}

    def _update_policy(
        self, experience: Experience, mini: list[list[int]], sums: dict[str, float], is_first: bool
    ) -> float:
        """One update, its metrics added to `sums`; returns the gradient's norm."""
        rows = [row for micro in mini for row in micro]
        loss = self.method.loss
        normalizer = Normalizer.of(experience.loss_mask[rows])
        update = self.policy.update(
            experience, mini, Objective(loss, normalizer, loss.needs_entropy_gradient, is_first)
        )  # fmt: skip
        if update.logprobs is not None:
            assert experience.old_logprobs is not None
            experience.old_logprobs[rows] = update.logprobs[rows]
        _add(sums, update)
        return update.grad_norm

    def _update_critic(
        self, critic: Critic, experience: Experience, mini: list[list[int]], sums: dict[str, float]
    ) -> float:
        """As `_update_policy`."""
        value_loss = self.method.value_loss
        assert value_loss is not None
        normalizer = Normalizer.of(value_loss.mask(experience.rows([row for micro in mini for row in micro])))
        update = critic.update(experience, mini, Objective(value_loss, normalizer))
        _add(sums, update)
        return update.grad_norm

    @contextmanager
    def _sleeping_generator(self) -> Iterator[None]:
        """The generator sleeps during an update and then takes the policy's weights, also where the update diverged."""
        self.generator.sleep()
        try:
            yield
        except DivergedError:
            self._hand_over()
            raise
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the generator the policy's weights; one that shares them has them."""
        self.generator.wake()
        self.generator.update_weights(self.policy.weights())

    def _validate(self, step: int) -> dict[str, float]:
        """Play the validation questions greedily; the best policy so far is kept."""
        if not self.validation:
            return {}
        played = self.validator.play(self.validation, 1, Sampling(0.0, 1.0, (), seed=0))
        # An outage says nothing about the policy, so its trajectories count neither way.
        sound = [(t, q) for t, q in zip(played, self.validation, strict=True) if t.status != "failed"]
        if not sound:
            raise RetrievalError(
                f"validation: all {len(played)} trajectories failed ({played[0].error}). Mend the search."
            )
        ems = [text.exact_match(t.answer, q.answers) for t, q in sound]
        f1s = [text.f1(t.answer, q.answers) for t, q in sound]
        searches = sum(t.num_searches for t, _ in sound) / len(sound)
        em = sum(ems) / len(ems)
        self._keep_best(step, em)
        return {
            "validation_em": em, "validation_f1": sum(f1s) / len(f1s), "validation_num_searches": searches,
        }  # fmt: skip

    @property
    def _best(self) -> Path:
        return self.scratch / "best"

    def _keep_best(self, step: int, em: float) -> None:
        if self.conf.select == "last":
            return
        before = [row["metrics"].get("validation_em", -1.0) for row in self.progress.history]
        if em >= max(before, default=-1.0):
            self.progress.selected_step = step
            self.policy.export(self._best / str(step))

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            self.progress.history.append({"step": step, "metrics": metrics})
            self.log(step, metrics)

    def _record(self, step: int, played: _Played, rows: Sequence[int], experience: Experience) -> None:
        """Write the first trajectories that were learned from; `rows`: the samples of the experience."""
        is_last = step == self.conf.num_steps or self._is_spent()
        wanted = step == 1 or is_last or step % self.conf.validate_every == 0
        if not wanted or not self.conf.record_trajectories:
            return
        learned = recorded(played.trajectories, played.samples, played.scores, played.owners, rows, experience)
        schema.write(
            self.scratch / "trajectories" / f"{step:08d}.jsonl",
            [
                trajectory_row(
                    trajectory, played.questions[trajectory.question_id], policy="", seed=self.seed, mode="sampled",
                    step=step, tokenizer=self.player.tokenizer, scores=scores, advantages=advantages,
                )
                for trajectory, scores, advantages in learned[: self.conf.record_trajectories]
            ],
        )  # fmt: skip

    def _save(self) -> None:
        progress = self.progress
        record = vars(progress) | {"cost": vars(progress.cost)}
        with checkpoint.writing(self.scratch / "checkpoints", progress.step) as folder:
            self.policy.save(folder / "policy")
            if self.critic is not None:
                self.critic.save(folder / "critic")
            values = {"settings": self._settings(), "progress": record}
            checkpoint.write_state(folder / "run", {"rng/torch": torch.get_rng_state()}, values)
        for folder in self._best.glob("*"):
            if folder.name != str(progress.selected_step):
                shutil.rmtree(folder)

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint was made with; a run may be made longer, nothing else may differ.

        A longer run has one validation more (at the end of the shorter one), from which its best may come.
        """
        settings = {"train": plain(self.conf), "method": plain(self.method), "seed": self.seed}
        if not self.method.search.depends_on_budget:
            del settings["train"]["num_steps"], settings["train"]["max_generated_tokens"]
        return cast(dict[str, Any], json.loads(json.dumps(settings, default=lambda part: type(part).__qualname__)))

    def _resume(self) -> None:
        folder = checkpoint.latest(self.scratch / "checkpoints")
        if folder is None:
            return
        tensors, values = checkpoint.read_state(folder / "run")
        if (found := values["settings"]) != (ours := self._settings()):
            differ = [name for name in ours if found.get(name) != ours[name]]
            raise DataError(
                f"{self.scratch / 'checkpoints'}: made with other settings ({', '.join(differ)}) than this run's. "
                f"Continue with those, or delete the folder to start anew."
            )
        self.policy.load(folder / "policy")
        if self.critic is not None:
            self.critic.load(folder / "critic")
        torch.set_rng_state(tensors["rng/torch"])
        record = values["progress"]
        self.progress = Progress(**record | {"cost": RolloutCost(**record["cost"])})
        self.player.cost = self.progress.cost
        self._hand_over()


def recorded(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], scores: Sequence[Scores],
    owners: Sequence[int | None], rows: Sequence[int], experience: Experience,
) -> list[tuple[Trajectory, Scores, list[float]]]:  # fmt: skip
    """Trajectories of which samples were learned from, with the rewards and advantages of these on their tokens.

    Args:
        trajectories: all of a step.
        samples, scores, owners: all of a step; see `Draw`.
        rows: which samples were learned from, in the order of the experience.
        experience: with advantages.
    """
    assert experience.advantages is not None
    parts: dict[int, list[tuple[int, int]]] = {}  # Trajectory -> (sample, its row of the experience).
    for row, i in enumerate(rows):
        if (owner := owners[i]) is not None:
            parts.setdefault(owner, []).append((i, row))

    learned = []
    for owner, own in parts.items():
        trajectory = trajectories[owner]
        advantages = [0.0] * len(trajectory.response_ids)
        on_trajectory = []
        for i, row in own:
            prefix, count = len(samples[i].prefix_ids), len(samples[i].ids)
            start = prefix - len(trajectory.prompt_ids)
            advantages[start : start + count] = experience.advantages[row, prefix : prefix + count].tolist()
            placed = tuple((start + position, value) for position, value in scores[i].placed)
            on_trajectory.append(replace(scores[i], placed=placed))
        learned.append((trajectory, total(on_trajectory), advantages))
    return learned


def _add(sums: dict[str, float], update: Update) -> None:
    """Add the metrics of every micro-batch, one after another: their order decides the last bits."""
    for metrics in update.metrics:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
