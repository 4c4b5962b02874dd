"""One step off: the rollouts of the next step are played while this step is learned.

They are played with the weights before this step, so the policy that learns from them is one step ahead of them. Old
log-probabilities are then computed by the trainer, and the method's `importance_cap` weighs the distance to what the
generator reported.

A step after which the run validates, writes a checkpoint or ends plays nothing ahead: the next one is played with its
weights. So what a run does from a checkpoint on follows from that checkpoint.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from tasks.clock import Clock
from tasks.conf import require
from tasks.train.order import Refill, Rollouts
from tasks.train.resume import Progress
from tasks.train.settings import TrainConf


def require_apart(conf: TrainConf, kind: type) -> None:
    """Raise the ValueError for a run that plays ahead with a kind of generator that computes in this process."""
    expected = "false, or a generator with processes of its own: set GENERATOR=fleet_ahead"
    is_apart = not conf.play_ahead or getattr(kind, "plays_apart", False)
    require(is_apart, f"train: play_ahead with {kind.__name__}", conf.play_ahead, expected)


def plays_ahead(conf: TrainConf, progress: Progress, step: int, before: int) -> bool:
    """Whether the step after this one is played while this one is learned.

    Args:
        conf: of the run.
        progress: after the play of `step`, before its end.
        step: the one that is learned.
        before: tokens that were generated before it.
    """
    after = replace(progress, step=step)
    ends = after.is_over(conf) or after.is_due(conf, before) or step % conf.checkpoint_every == 0
    return conf.play_ahead and not ends


@dataclass(frozen=True)
class _Play:
    """A step that is being played; `progress` has the counts that the run will have after it."""

    step: int
    progress: Progress
    rollouts: Future[Rollouts]


class Ahead:
    """At most one step that is being played beside the learning of the one before it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._play: _Play | None = None

    def begin(self, step: int, refill: Refill) -> None:
        """Play this step beside what follows. Its counts are not the run's before it is taken."""
        assert self._play is None
        counted = refill.progress
        progress = Progress(
            step=step - 1,
            cost=replace(counted.cost),
            num_trajectories=counted.num_trajectories,
            num_failed=counted.num_failed,
            num_draws=counted.num_draws,
        )
        own = replace(refill, progress=progress, player=replace(refill.player, cost=progress.cost, clock=Clock()))
        self._pool = self._pool or ThreadPoolExecutor(1, "ahead")
        self._play = _Play(step, progress, self._pool.submit(own.collect, step))

    def wait(self) -> None:
        """Until the generator is idle; `take` raises what the play has raised."""
        if self._play is not None:
            self._play.rollouts.exception()

    def take(self, step: int, progress: Progress) -> Rollouts | None:
        """The rollouts of this step, whose counts become the run's; None if it was not played ahead.

        Raises:
            RetrievalError, ValueError: as `Refill.collect`.
        """
        play, self._play = self._play, None
        if play is None:
            return None
        assert play.step == step, play.step
        rollouts = play.rollouts.result()

        counted = play.progress
        for name, count in vars(counted.cost).items():
            setattr(progress.cost, name, count)  # The player counts in this very object.
        progress.num_trajectories, progress.num_failed = counted.num_trajectories, counted.num_failed
        progress.num_draws = counted.num_draws
        return rollouts

    def drop(self) -> None:
        """Forget what is being played, because the run ends or the weights that play are not sound."""
        with suppress(Exception):
            self.wait()
        self._play = None

    def close(self) -> None:
        """End the thread; it may still play where the run was ended from outside."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
