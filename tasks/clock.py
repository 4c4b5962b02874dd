"""Where the seconds of a run go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = {
    "play": ("play", "the policy writes"),
    "search": ("search", "play waits for searches"),
    "score": ("rewards", "trajectories get their rewards"),
    "logprobs": ("log-probabilities", "log-probabilities and values before the first update"),
    "learn": ("learning", "updates of policy and critic"),
    "hand_over": ("hand-over", "the generator gets the new weights"),
    "validate": ("validation", "validation questions are played"),
    "save": ("saving", "checkpoints and the best policy are written"),
}
"""Part of a step -> its name and what it is."""


class Clock:
    """Adds up seconds by part. Seconds of a part inside another one are the inner one's alone.

    It belongs to one thread. Work that other threads do beside it counts as far as this thread waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # By part that is open, the seconds of the parts inside it.

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the block's seconds as this part's, also if it raises."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[part] += taken - self._inner.pop()
            self._inner[-1] += taken

    def take(self) -> dict[str, float]:
        """Seconds by part since this was last asked, to the millisecond."""
        taken = {part: round(seconds, 3) for part, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
