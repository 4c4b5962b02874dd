"""Reinforcement learning: play, score, filter, learn, validate, save. One loop for all methods.

A step is a pure function of (weights, optimizer state, step number, draws so far), because the step and draw numbers
seed questions, generation and mini-batches. So k steps, a restart and N - k steps equal N steps bit for bit on a CPU.
The loop knows the parts of a method only by their protocols. It reports through `log` and never imports tracking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import crew, footprint
from tasks.agent.rollout import Player
from tasks.clock import Clock
from tasks.engine import Critic, DivergedError, Policy
from tasks.flops import Trained
from tasks.generate import Generator, Sampling
from tasks.records.usage import PROCESS, named_by_role, usages
from tasks.records.work import Work
from tasks.rl.method import Method
from tasks.services import NO_SERVICES, Services
from tasks.train.ahead import Ahead, plays_ahead, require_apart
from tasks.train.handing import Handed
from tasks.train.order import SEEDS_OF_DRAWS, Order, Refill
from tasks.train.record import Recorder
from tasks.train.resume import Checkpoints, Progress, settings_of
from tasks.train.settings import TrainConf
from tasks.train.update import Learner
from tasks.train.validate import BestPolicy, validate
from tasks.train.variance import VARIANCE_DRAW, VarianceOfAdvantages
from tasks.types import Question

log = logging.getLogger(__name__)
Log = Callable[[int, dict[str, float]], None]


@dataclass
class Trainer:
    """One run of one method from one start policy.

    Args:
        conf: budget and schedule.
        method: the composition of parts.
        policy, critic: engines; the critic is None where the method needs none.
        generator: generates with the policy's weights. It shares them, or sleeps during an update and copies them
            after.
        player: plays training questions; its `cost` counts the tokens of this run.
        validator: plays the validation questions greedily.
        questions, validation: training and validation questions.
        seed: of data order, draws and mini-batches.
        scratch: folder of checkpoints, the best policy and recorded trajectories.
        log: receives (step, metrics).
        services: what the method's parts call, by role.
        watch: receives the number of validation questions that have been played, of how many.
        models: the sizes of policy and critic; None where operations are not counted.
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
    watch: Callable[[int, int], object] = lambda done, total: None
    models: Trained | None = None
    _ahead: Ahead = field(default_factory=Ahead, init=False)
    _work: Work = field(default_factory=Work, init=False)
    _handed: Handed = field(default_factory=Handed, init=False)

    def run(self) -> Progress:
        """Train to the last step, from the newest sound checkpoint if there is one.

        Raises:
            RetrievalError: more than `max_failed_share` of a draw's searching trajectories failed, or all of a
                validation's; the last checkpoint is kept.
            DataError: the prompt of a training question is over its budget, or a checkpoint was made with other
                settings.
            ValueError: no training question, a policy that ends every call at once, or a generator that cannot play
                while the policy learns, where it should.
        """
        if not self.questions:
            raise ValueError("no question to train on: expected at least one of split 'train'. Check the data stage.")
        require_apart(self.conf, type(self.generator))
        self.player.prompts(self.questions)  # A prompt over its budget ends the run now instead of in some later step.
        per_step = self.conf.num_questions(self.method.sampler.size)
        if per_step > len(self.questions):
            log.warning(
                "a step asks for %d questions, but the data has %d: it takes all.", per_step, len(self.questions)
            )

        self._resume()
        if self.progress.step == 0 and not self.progress.history:
            self._variance.write("start", self.questions)
            self._report(0, self._validate(0))
        try:
            while not self.progress.is_over(self.conf):
                self._advance(self.progress.step + 1)
        finally:
            self._ahead.close()
        self.progress.spend(self._clock.take())
        self._variance.write("trained", self.questions)
        return self.progress

    def export(self, folder: Path) -> None:
        """Write the policy the run ends with (`TrainConf.select`) as a model folder."""
        selected = self.progress.selected_step
        if selected is None or selected == self.progress.step:
            self.policy.export(folder)
        else:
            self._best.export(selected, folder)

    def trajectories(self) -> list[dict[str, Any]]:
        """The recorded training trajectories, by step."""
        return self._recorder.read()

    def variances(self) -> list[dict[str, Any]]:
        """The rows of the variance of advantages, none where it is not measured."""
        return self._variance.read()

    def _advance(self, step: int) -> None:
        """One step, then validation, reports and checkpoints that are due after it."""
        progress, before = self.progress, self.progress.cost.generated
        used_before = {role: usage.copy() for role, usage in usages(self.services).items()}
        try:
            metrics = self._step(step, before)
        except DivergedError as error:
            if self.conf.collapse is None:
                raise
            progress.stopped = str(error)
            metrics = {"generated_tokens_total": progress.cost.generated}
        progress.step = step
        used = {role: usage.since(used_before[role]) for role, usage in usages(self.services).items()}
        metrics |= progress.use(used)

        is_validated = progress.is_due(self.conf, before) or progress.is_over(self.conf)
        if is_validated:
            metrics |= self._validate(step)
        if self.conf.collapse is not None and progress.stopped is None:
            progress.stopped = self.conf.collapse.reason([*progress.history, {"step": step, "metrics": metrics}])
        if progress.stopped is not None:
            self._ahead.drop()
            log.warning("stopped at step %d: %s", step, progress.stopped)
            # Validate once more, so that the curve includes the final step.
            metrics |= {} if is_validated else self._validate(step)
        self._report(step, metrics, named_by_role(used, PROCESS))

        # Also whenever the best policy changes; otherwise a resumed run would point to a deleted folder.
        if step % self.conf.checkpoint_every == 0 or progress.is_over(self.conf) or progress.selected_step == step:
            with self._clock("save"):
                self._checkpoints.save(progress)
                self._best.keep_only(progress.selected_step)

    def _step(self, step: int, before: int) -> dict[str, float]:
        """Play, learn and record; returns the metrics. `before` tokens were generated before this step."""
        refill = self._refill
        ahead = self._ahead.take(step, self.progress)
        rollouts = refill.collect(step) if ahead is None else ahead
        self._work.add(rollouts.work)
        metrics = rollouts.metrics()
        if self.conf.play_ahead:
            metrics["weights_behind"] = float(ahead is not None)

        # A filter that kept too few questions leaves noise, so the step plays but does not update.
        is_enough = len(rollouts.kept_questions) >= refill.fewest
        if refill.may_repeat:
            metrics |= {"sampling_rounds": rollouts.num_rounds, "filter_kept_share": rollouts.kept_share}
        if refill.may_repeat or not is_enough:
            metrics["skipped_update"] = float(not is_enough)

        if is_enough:
            rows = rollouts.of_first(refill.order.count)
            samples = [rollouts.samples[i] for i in rows]
            scores = [rollouts.scores[i] for i in rows]
            plays_on = plays_ahead(self.conf, self.progress, step, before)
            with self._playing(step + 1) if plays_on else self._sleeping_generator():
                experience, learned = self._learner.learn(samples, scores, step)
            metrics |= learned
            is_last = step == self.conf.num_steps or self.conf.is_spent(self.progress.cost.generated)
            if step == 1 or is_last or step % self.conf.validate_every == 0:
                self._recorder.write(step, rollouts, rows, experience)

        return metrics | self.progress.totals()

    def _validate(self, step: int) -> dict[str, float]:
        """Validation metrics; the policy is saved if it is the best so far."""
        total = len(self.validation)
        if total:
            self.watch(0, total)
        with self._clock("validate"):
            metrics = validate(self.validator, self.validation, lambda done: self.watch(done, total))
        is_selecting = metrics and self.conf.select == "best"
        with self._clock("save"):
            if is_selecting and self._best.offer(step, metrics["validation_em"], self.progress.history):
                self.progress.selected_step = step
        return metrics

    def _report(self, step: int, metrics: dict[str, float], of_process: dict[str, float] | None = None) -> None:
        """Keep the metrics, and log them with those that another process would not repeat."""
        if metrics:
            self.progress.history.append({"step": step, "metrics": metrics})
            measured = self.progress.spend(self._clock.take(), self._work.take())
            held = {f"memory/{name}": size for name, size in memory(self).items()}
            self.log(step, metrics | (of_process or {}) | self._handed.take() | measured | held)

    def _resume(self) -> None:
        """Go on from the newest checkpoint if there is one, and let the player count in the run's progress."""
        restored = self._checkpoints.load()
        if restored is not None:
            self.progress = restored
            self._hand_over()
        self.player.cost = self.progress.cost

    @contextmanager
    def _sleeping_generator(self) -> Iterator[None]:
        """The generator sleeps during an update and then takes the new weights, also if the update diverged."""
        self.generator.sleep()
        try:
            yield
        except DivergedError:
            self._hand_over()
            raise
        self._hand_over()

    @contextmanager
    def _playing(self, step: int) -> Iterator[None]:
        """The generator plays this step during an update and takes the new weights when both are over."""
        self._ahead.begin(step, self._refill)
        try:
            yield
        except DivergedError:
            self._ahead.drop()
            raise
        with self._clock("play"):  # As far as it took longer than the update.
            self._ahead.wait()
        self._hand_over()

    def _hand_over(self) -> None:
        """Wake the generator and give it the policy's weights; one that shares them ignores the call."""
        with self._clock("hand_over"):
            self._handed.over(self.policy, self.generator)

    # Helpers of the run. Each is made anew from what it reads, so that none holds state of its own.

    @property
    def _refill(self) -> Refill:
        per_step = self.conf.num_questions(self.method.sampler.size)
        order = Order(self.questions, min(per_step, len(self.questions)), self.seed)
        return Refill(self.conf, self.method, self.player, self.services, order, self.seed, self.progress)

    @property
    def _learner(self) -> Learner:
        plays_own_weights = self.player.generator.shares_weights
        parts = (self.conf, self.method, self.policy, self.critic)
        return Learner(*parts, plays_own_weights, self.seed, self._clock, self._work, self.models)

    @property
    def _clock(self) -> Clock:
        return self.player.clock

    @property
    def _recorder(self) -> Recorder:
        folder = self.scratch / "trajectories"
        return Recorder(folder, self.conf.record_trajectories, self.player.tokenizer, self.seed)

    @property
    def _variance(self) -> VarianceOfAdvantages:
        method, refill = self.method, self._refill
        sampling = Sampling(method.temperature, method.top_p, (), VARIANCE_DRAW + self.seed * SEEDS_OF_DRAWS)
        size, count = method.sampler.size, self.conf.variance_questions
        return VarianceOfAdvantages(self.scratch / "variance", self.player, refill.score, sampling, size, count)

    @property
    def _best(self) -> BestPolicy:
        return BestPolicy(self.scratch / "best", self.policy)

    @property
    def _checkpoints(self) -> Checkpoints:
        settings = settings_of(self.conf, self.method, self.seed)
        return Checkpoints(self.scratch / "checkpoints", settings, self.policy, self.critic)


def memory(trainer: Trainer) -> dict[str, float]:
    """Most memory of this process and of those that work for it so far; see `footprint.summed`."""
    parts = (trainer.policy, trainer.generator, trainer.player.generator)
    return footprint.summed(footprint.own(), crew.footprints(parts))
