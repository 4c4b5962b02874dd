"""Shows how far a stage is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 5.0


def progress(iterable: Iterable[T], total: int | None, desc: str, initial: int = 0) -> Iterator[T]:
    """Yield the items and show how far we are, on standard error: standard output stays for results.

    `initial` items were done before (a resumed stage): they count as done and not in the rate.
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
    left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
    return f"{desc}: {done}/{total} ({100 * done / total:.0f}%, {rate:.2f}/s{left})"


class Bar:
    """Progress of work that reports how far it is instead of handing out items.

    What the first report finds done may be the work of an earlier attempt, so the rate counts from there.

    Args:
        desc: what is done.
        total: when it is done.
        hear: hears of the metrics of each step.
    """

    def __init__(self, desc: str, total: int, hear: Callable[[int, dict[str, float]], None]) -> None:
        self._desc, self._total, self._hear = desc, total, hear
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
        """Advance to `step` and hand its metrics on."""
        self.show(step)
        self._hear(step, metrics)
