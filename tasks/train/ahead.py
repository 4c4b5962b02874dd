"""One step off: the rollouts of the next step are played while this step is learned.

They are played with the weights before this step, so the policy that learns from them is one update ahead. Old
log-probabilities are then computed by the trainer, and the method's `importance_cap` weighs the distance to what the
generator reported.

A step that ends a span, after which the run validates or writes a checkpoint, plays nothing ahead: the next one is
played with its weights. So what a run does from a checkpoint on follows from that checkpoint.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

from tasks.train.order import Refill, Rollouts
from tasks.train.resume import Progress


class Ahead:
    """At most one step that is being played."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._playing: tuple[int, Progress, Future[Rollouts]] | None = None

    def begin(self, step: int, refill: Refill) -> None:
        """Play this step beside what follows. Its counts are its own until it is taken."""
        assert self._playing is None
        progress = deepcopy(refill.progress)
        own = replace(refill, progress=progress, player=replace(refill.player, cost=progress.cost))
        self._playing = (step, progress, self._pool.submit(own.collect, step))

    def wait(self) -> None:
        """Until the generator is idle; an error of the play is raised by `take`."""
        if self._playing is not None:
            self._playing[2].exception()

    def take(self, step: int, progress: Progress) -> Rollouts | None:
        """The rollouts of this step, whose counts are then the run's; None if it was not played ahead.

        Raises:
            RetrievalError, ValueError: as `Refill.collect`.
        """
        if self._playing is None or self._playing[0] != step:
            return None
        _, counted, future = self._playing
        self._playing = None
        rollouts = future.result()
        for name in ("prefilled", "generated", "searches"):
            setattr(progress.cost, name, getattr(counted.cost, name))
        progress.num_draws, progress.num_trajectories = counted.num_draws, counted.num_trajectories
        progress.num_failed = counted.num_failed
        return rollouts

    def drop(self) -> None:
        """Forget what is being played, for a run that ends."""
        self.wait()
        self._playing = None
        self._pool.shutdown()
