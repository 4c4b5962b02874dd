"""Shows the progress of a stage: one line that is drawn again on a terminal, else a whole line every few seconds.

A run writes its clock and the stage's name before each line, so a line leaves room for them in 80 columns.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

COLUMNS = 80
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_DRAWINGS = 5.0, 0.2
TOKENS = "generated_tokens_total"

FIGURES = (
    ("reward_mean", "reward"),
    ("em", "EM"),
    ("accuracy", "accuracy"),
    ("loss", "loss"),
    ("validation_em", "val EM"),
    ("kl", "kl"),
)
"""Metrics that say how learning goes, with the words for them; the first that a stage has is always shown."""


def room(name: str) -> int:
    """Columns that a line of stage `name` may have."""
    if sys.stderr.isatty():
        return shutil.get_terminal_size((COLUMNS, 24)).columns - 1
    return COLUMNS - (len(f"[  0:00] {name} | ") if "BREADCRUMB_RUN" in os.environ else 0)


def progress(iterable: Iterable[T] | None, total: int | None, desc: str, done: int = 0) -> Any:
    """A `tqdm` on standard error, because standard output is for results; `done` items do not count in its rate."""
    from tqdm import tqdm

    wait_s = SECONDS_BETWEEN_LINES
    line = f"{'{desc}: ' * bool(desc)}{{n_fmt}}/{{total_fmt}} ({{percentage:.0f}}%, {{rate_fmt}}, {{remaining}} left)\n"
    lines = {} if sys.stderr.isatty() else {"bar_format": line, "mininterval": wait_s, "delay": wait_s}
    return tqdm(iterable, desc, total, initial=done, dynamic_ncols=True, **lines)


@dataclass
class Bar:
    """Progress of work that reports a number of finished steps, to `on_metrics` with their metrics, instead of items.

    The steps before the first report may be those of an earlier attempt, so the rate counts from there.

    Attributes:
        name: of the stage.
        total: steps at most.
        on_metrics: receives (step, metrics).
        max_tokens: generated tokens with which the work ends, too; 0 is no limit.
        unit: what a step is called; empty for none.
    """

    name: str
    total: int
    on_metrics: Callable[[int, dict[str, float]], None]
    max_tokens: int = 0
    unit: str = ""
    _known: dict[str, float] = field(default_factory=dict, init=False)
    _began: tuple[float, int, float] | None = field(default=None, init=False)  # Clock, steps and tokens.
    _drawn: float = field(default=0.0, init=False)
    _drawn_at: int = field(default=-1, init=False)
    _done: int = field(default=0, init=False)
    _is_open: bool = field(default=False, init=False)

    def show(self, done: int, figures: Mapping[str, float] | None = None) -> None:
        """Advance to `done`, with the newest figures of learning."""
        self._known |= {name: value for name, value in (figures or {}).items() if isinstance(value, int | float)}
        self._done, now = done, time.monotonic()
        if self._began is None:
            self._began, self._drawn = (now, done, self._tokens), now
        wait_s = SECONDS_BETWEEN_DRAWINGS if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        if now - self._drawn >= wait_s:
            self._draw(now)
        if done >= self.total:
            self.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Advance to `step` and report its metrics, if there are any."""
        self.show(step, metrics)
        if metrics:
            self.on_metrics(step, metrics)

    def close(self) -> None:
        """Say where the work ended, if it was long enough to be shown: a budget of tokens ends it before all steps."""
        if not self._is_open:
            return
        if self._done != self._drawn_at:
            self._draw(time.monotonic())
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        self._is_open = False

    @property
    def _tokens(self) -> float:
        return self._known.get(TOKENS, 0.0)

    def _draw(self, now: float) -> None:
        self._drawn, self._drawn_at, self._is_open = now, self._done, True
        if sys.stderr.isatty():
            text = fitted(self.parts(now), room(self.name) - len(self.name) - 2)
            print(f"\r\033[K{self.name}: {text}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{fitted(self.parts(now), room(self.name))}\n", end="", file=sys.stderr, flush=True)

    def parts(self, now: float) -> list[tuple[str, str]]:
        """What a line says: each part in full and short, for where there is little room; empty: it may be left out."""
        counted = f"{self._done}/{self.total}"
        found = [(f"{self.unit} {counted}".strip(), counted)]
        names = {name: words for name, words in FIGURES if name in self._known}
        if "reward_mean" in names:
            names.pop("loss", None)  # A policy's loss says nothing about how much it has learned.
        for i, (name, words) in enumerate(names.items()):
            text = f"{words} {self._known[name]:.2f}"
            found.append((text, text.removeprefix("val ") if i == 0 or name == "validation_em" else ""))
        if self.max_tokens:
            used = f"{thousands(self._tokens)}/{thousands(self.max_tokens)}"
            found.append((f"{used} tokens", used))
        seconds = self.seconds_left(now)
        return [*found, *([(left := f"{clock(seconds)} left", left)] if seconds is not None else [])]

    def seconds_left(self, now: float) -> float | None:
        """By the budget that is spent first at the rate so far: steps or tokens; None before there is a rate."""
        if self._began is None:
            return None
        clock_s, done, tokens = self._began
        budgets = [(float(self._done - done), float(self.total - self._done))]
        if self.max_tokens:
            budgets.append((self._tokens - tokens, max(self.max_tokens - self._tokens, 0.0)))
        known = [(now - clock_s) * rest / spent for spent, rest in budgets if spent > 0]
        return min(known, default=None)


def fitted(parts: Sequence[tuple[str, str]], columns: int) -> str:
    """The parts in one line: in full where that fits, else with less space, else short, else without the last but one.

    >>> fitted([("step 1/9", "1/9"), ("kl 0.02", ""), ("0:14 left", "0:14 left")], 14)
    '1/9  0:14 left'
    """
    full = [part for part, _ in parts]
    needed = [part for part, short in parts if short]
    short = [short for _, short in parts if short]
    lines = ["  ".join(full), " ".join(full), "  ".join(needed), " ".join(needed), "  ".join(short), " ".join(short)]
    lines.append(" ".join([*short[:-2], *short[-1:]]))
    return next((line for line in lines if len(line) <= columns), lines[-1])


def thousands(count: float) -> str:
    """A number of tokens, short.

    >>> thousands(80_000), thousands(1_234), thousands(950)
    ('80k', '1.2k', '950')
    """
    return f"{count:.0f}" if count < 1000 else f"{count / 1000:.1f}k" if count < 10_000 else f"{count / 1000:.0f}k"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> clock(14), clock(3725)
    ('0:14', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
