"""Budget and schedule of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.conf import require
from tasks.engine import OptimizerConf, Sharing
from tasks.model import Dtype
from tasks.train.health import CollapseConf


@dataclass(frozen=True)
class TrainConf:
    """Budget and schedule of a training run (`train` in conf/scale, overridden by a method's `scales`).

    Attributes:
        num_steps: at most this many steps; a step is one batch of rollouts with its updates.
        max_generated_tokens: the run ends with the step that reaches so many generated tokens, those of dropped
            trajectories included, so that methods are compared at an equal budget; 0 is no limit.
        prompts_per_step, rollouts_per_step: exactly one is given; the other follows from the number of rollouts that
            the method's sampler plays per question.
        minibatches: updates per batch of rollouts.
        minibatches_of: what is divided into mini-batches: single samples, or questions with all their samples.
        epochs: passes over a batch of rollouts.
        max_batch_tokens: tokens of one forward and backward, padding included.
        policy, critic: optimizers.
        old_logprobs: `trainer` computes them again before the first update. `sampler` reuses the generator's, which
            saves a forward pass; they differ by rounding. Two cases compute them in spite of `sampler`: a generator
            with its own copy of the weights (vLLM), which may differ by more, and a KL penalty in the reward, which
            must be exactly 0 where the policy has not moved (whitening would amplify rounding errors).
        dtype: of forward passes.
        keep_activations: false computes them again in the backward pass, which takes time and saves memory.
        share_prefixes: read a prefix once for all its samples in a forward and backward. Samples of one prefix are then
            in one mini-batch; results differ by that and by rounding. `max_batch_tokens` counts a prefix once.
            `longest` does so with every common beginning, such as a search that several rollouts wrote in the same
            words, and the passages that it found.
        num_threads: torch threads (part of the result on a CPU).
        checkpoint_every, validate_every: steps between checkpoints, and between validations.
        validate_questions: number of questions that validation plays greedily; 0 is no validation.
        validate_every_tokens: validate every so many generated tokens instead of every so many steps, so that a method
            whose steps cost more is validated as often. 0, or a method that generates nothing: by steps.
        questions: `found` trains on those questions only for which a search with the question itself brings a passage
            that holds an answer. On all others few rollouts are right, and a group of equal rewards teaches nothing;
            but these questions seldom need a second search. Validation and evaluation play all questions.
        groups: `unequal` leaves out of the updates the groups in which all advantages are 0, because all rewards are
            equal. They would only hold the policy near its reference, and cost as much as the others. Means over tokens
            are then over the groups that are left. A method that does not compare rollouts in groups (PPO) learns from
            all.
        play_ahead: play the next step while a step is learned. The policy has then moved once since the weights that
            play, except after a validation or a checkpoint, which the next step waits for. It needs a generator with
            processes of its own, such as `fleet`.
        variance_questions: number of questions on which the variance of advantages is measured, before and after
            training (`tasks.train.variance`); 0 measures nothing.
        record_trajectories: trajectories per recorded step; the first, the last and every `validate_every`-th are
            recorded.
        select: the policy a run ends with, the best by validation EM (of equal ones the latest) or the last.
        collapse: rules that stop a hopeless run; null never stops one.
        max_failed_share: largest share of the searching trajectories of a draw that may fail. Above it the run
            stops, because the survivors would be biased towards few searches.
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
    share_prefixes: Sharing = False
    minibatches_of: Literal["samples", "questions"] = "samples"
    variance_questions: int = 0
    questions: Literal["all", "found"] = "all"
    groups: Literal["all", "unequal"] = "all"
    play_ahead: bool = False

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "at least 1")
        require(0 <= self.max_failed_share <= 1, "max_failed_share", self.max_failed_share, "0 to 1")
        num_null = (self.prompts_per_step is None) + (self.rollouts_per_step is None)
        require(
            num_null == 1,
            "prompts_per_step",
            self.prompts_per_step,
            "a number for it or for rollouts_per_step, and null for the other",
        )
        for name in ("minibatches", "epochs", "max_batch_tokens", "checkpoint_every", "validate_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(1 <= self.num_threads <= 1024, "num_threads", self.num_threads, "1 to 1024")
        for name in ("prompts_per_step", "rollouts_per_step"):
            count = getattr(self, name)
            require(count is None or count >= 1, name, count, "null or at least 1")
        numbers = ("validate_questions", "validate_every_tokens", "variance_questions", "record_trajectories")
        for name in (*numbers, "max_generated_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 (none) or more")

    def num_questions(self, rollouts_per_question: int) -> int:
        """Questions of one draw."""
        if self.prompts_per_step is not None:
            return self.prompts_per_step
        assert self.rollouts_per_step is not None
        return max(1, self.rollouts_per_step // rollouts_per_question)

    def is_spent(self, generated_tokens: int) -> bool:
        """Whether this many generated tokens use up the run's budget."""
        return 0 < self.max_generated_tokens <= generated_tokens
