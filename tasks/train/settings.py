"""Budget and schedule of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.conf import require
from tasks.engine import OptimizerConf
from tasks.model import Dtype
from tasks.train.health import CollapseConf


@dataclass(frozen=True)
class TrainConf:
    """Budget and schedule of a training run (`train` in conf/scale, overridden by a method's `scales`).

    Attributes:
        num_steps: optimizer steps in the project's sense, one batch of rollouts each; at most this many.
        max_generated_tokens: the run ends with the round of rollouts that reaches so many, dropped trajectories
            included, so that methods are compared at an equal budget; 0 is no limit.
        prompts_per_step, rollouts_per_step: exactly one is given; the other follows from the rollouts that the
            method's sampler takes for a question.
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
        validate_every_tokens: validate every so many generated tokens instead of every so many steps, so that a method
            whose steps cost more is validated as often. 0, or a method that generates nothing: by steps.
        record_trajectories: per recorded step; recorded are the first, last and every `validate_every`-th.
        select: the policy a run ends with: the best by validation EM (of equal ones the latest), or the last.
        collapse: when a run is stopped as hopeless; null never.
        max_failed_share: largest share of searching trajectories that may fail in a step. Above it the run stops,
            because the survivors would be biased towards few searches.
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

    def num_questions(self, rollouts_per_question: int) -> int:
        """Questions of one draw."""
        if self.prompts_per_step is not None:
            return self.prompts_per_step
        assert self.rollouts_per_step is not None
        return max(1, self.rollouts_per_step // rollouts_per_question)

    def is_spent(self, generated_tokens: int) -> bool:
        """Whether so many generated tokens use up the run's budget."""
        return 0 < self.max_generated_tokens <= generated_tokens
