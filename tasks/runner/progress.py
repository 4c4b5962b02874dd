"""Shows the progress of a stage: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

LINE = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%, {rate_fmt}, {remaining} left)\n"
SECONDS_BETWEEN_LINES = 5.0


def progress(iterable: Iterable[T] | None, total: int | None, desc: str, done: int = 0) -> Any:
    """A `tqdm` on standard error, because standard output is for results; `done` items do not count in its rate."""
    from tqdm import tqdm

    wait_s = SECONDS_BETWEEN_LINES
    lines = {} if sys.stderr.isatty() else {"bar_format": LINE, "mininterval": wait_s, "delay": wait_s}
    return tqdm(iterable, desc, total, initial=done, dynamic_ncols=True, **lines)


class Bar:
    """Progress of work that reports a number of finished steps, to `on_metrics` with their metrics, instead of items.

    The steps before the first report may be those of an earlier attempt, so the rate counts from there.
    """

    def __init__(self, desc: str, total: int, on_metrics: Callable[[int, dict[str, float]], None]) -> None:
        self._desc, self._total, self._on_metrics = desc, total, on_metrics
        self._bar: Any = None

    def show(self, done: int) -> None:
        """Advance to `done`."""
        if self._bar is None:
            self._bar = progress(None, self._total, self._desc, done)
        self._bar.update(done - self._bar.n)
        if done >= self._total:
            self._bar.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Advance to `step` and report its metrics, if there are any."""
        self.show(step)
        if metrics:
            self._on_metrics(step, metrics)


class Watch:
    """Shows the progress of work that is done again and again, each time from the beginning."""

    def __init__(self, desc: str) -> None:
        self._desc = desc
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """So many items of this round are done; the last one ends it."""
        if self._bar is None:
            self._bar = progress(None, total, self._desc)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None
