"""Shows the progress of a stage: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 5.0


def progress(iterable: Iterable[T], total: int | None, desc: str, initial: int = 0) -> Iterator[T]:
    """Yield the items and show the progress on standard error, because standard output is for results.

    `initial` items were done before the stage was resumed; they count as done, but not in the rate.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(
            iterable, total=total, initial=initial, desc=desc, mininterval=0.3, dynamic_ncols=True, smoothing=0.1
        )
        return

    started = shown = time.monotonic()
    done = initial
    for item in iterable:
        yield item
        done += 1
        if (now := time.monotonic()) - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            print(_line(desc, done, initial, total, now - started), file=sys.stderr, flush=True)
    if shown != started or done == initial:
        print(_line(desc, done, initial, total, time.monotonic() - started), file=sys.stderr, flush=True)


def _line(desc: str, done: int, initial: int, total: int | None, seconds: float) -> str:
    rate = (done - initial) / seconds if seconds > 0 else 0.0
    if not total:
        return f"{desc}: {done} ({rate:.2f}/s)"
    rest = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
    return f"{desc}: {done}/{total} ({100 * done / total:.0f}%, {rate:.2f}/s{rest})"


class Bar:
    """Progress of work that reports a number of finished steps instead of handing out items.

    The steps before the first report may be those of an earlier attempt, so the rate counts from there.

    Args:
        desc: name of the work.
        total: number of steps.
        on_metrics: called with each step and its metrics.
    """

    def __init__(self, desc: str, total: int, on_metrics: Callable[[int, dict[str, float]], None]) -> None:
        self._desc = desc
        self._total = total
        self._on_metrics = on_metrics
        self._done = 0
        self._items: Iterator[int] | None = None

    def show(self, done: int) -> None:
        """Advance to `done`."""
        if self._items is None:
            self._done = done
            self._items = progress(iter(range(done, self._total)), self._total, self._desc, done)
        while self._done < done and next(self._items, None) is not None:
            self._done += 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Advance to `step` and report its metrics."""
        self.show(step)
        self._on_metrics(step, metrics)
