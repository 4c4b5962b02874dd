"""What a stage says of its progress: figures of learning, the budget that ends it, in lines that fit."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tasks.runner import progress
from tasks.runner.progress import Bar, fitted

LONG = "train@stepsearch_ow_penalty-0"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


class Terminal(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self) -> bool:
        return True


def trained(bar: Bar, clock: Clock, steps: int, seconds: float, tokens: int) -> None:
    """So many steps, each of so many seconds and tokens, the first after a validation."""
    bar.log(0, {"validation_em": 0.25})
    for step in range(1, steps + 1):
        clock.now += seconds
        metrics = {"reward_mean": step / 100, "kl": 0.02, "loss": 9.0, progress.TOKENS: float(step * tokens)}
        bar.log(step, metrics | ({"validation_em": 0.5} if step % 4 == 0 else {}))
    bar.close()


def test_a_line_says_what_is_learned_and_which_budget_ends_it(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 of 60 steps spend the tokens: after 8 of them half the time is over, and not 13%."""
    monkeypatch.delenv("BREADCRUMB_RUN", raising=False)
    logged: list[int] = []
    bar = Bar("train@a-0", 60, lambda step, metrics: logged.append(step), max_tokens=80_000, unit="step")
    trained(bar, clock, 16, 6.0, 5_000)
    lines = capfd.readouterr().err.splitlines()
    assert lines[7] == "step 8/60  reward 0.08  val EM 0.50  kl 0.02  40k/80k tokens  0:48 left"
    assert lines[-1] == "step 16/60  reward 0.16  val EM 0.50  kl 0.02  80k/80k tokens  0:00 left"
    assert (len(lines), logged) == (16, list(range(17)))
    assert not any("loss" in line or "%" in line for line in lines)


@pytest.mark.parametrize(
    ("steps", "max_tokens", "left"),
    [(60, 80_000, "0:48"), (12, 80_000, "0:24"), (60, 0, "5:12"), (2000, 0, "3:19:12")],
    ids=["tokens", "steps", "no budget of tokens", "hours"],
)
def test_seconds_are_those_of_the_budget_that_is_spent_first(
    clock: Clock, steps: int, max_tokens: int, left: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = Bar("train@a-0", steps, lambda step, metrics: None, max_tokens, "step")
    trained(bar, clock, 8, 6.0, 5_000)
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"{left} left")


def test_the_rate_of_a_resumed_run_is_that_of_this_attempt(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    """The first report is of step 12; the steps before it belong to a killed attempt."""
    bar = Bar("train@a-0", 60, lambda step, metrics: None, 80_000, "step")
    for step in (12, 13):
        bar.log(step, {progress.TOKENS: 5_000.0 * step})
        clock.now += 10.0
    bar.log(14, {progress.TOKENS: 70_000.0})
    assert capfd.readouterr().err.splitlines()[-1].endswith("70k/80k tokens  0:20 left")


@pytest.mark.parametrize("name", ["train@search_r1_grpo-0", LONG, "train@a-0", "reward_model@pica-12"])
def test_lines_of_two_stages_are_whole_and_fit_80_columns(
    clock: Clock, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run puts its clock and the stage's name before them; what is learned and the seconds left are always said."""
    monkeypatch.setenv("BREADCRUMB_RUN", "key")
    bars = [Bar(name, 60, lambda step, metrics: None, 80_000, "step") for _ in range(2)]
    for bar in bars:
        bar.log(0, {"validation_em": 0.25})
    for step in range(1, 4):
        clock.now += 6.0
        for bar in bars:
            bar.log(step, {"reward_mean": 0.71, "kl": 0.02, progress.TOKENS: 61_000.0})
    said = capfd.readouterr().err
    assert said.endswith("\n")
    assert "\r" not in said
    lines = said.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert re.search(r"reward 0\.71.*EM 0\.25.* \d:\d\d left$", line)
        assert ("61k/80k" in line) == (name != LONG)
        assert len(f"[  0:00] {name} | {line}") <= 80


def test_a_terminal_shows_one_line_that_is_drawn_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    trained(Bar("train@a-0", 60, lambda step, metrics: None, 80_000, "step"), clock, 16, 0.5, 5_000)
    shown = screen.getvalue()
    assert shown.count("\n") == 1
    drawn = shown.removesuffix("\n").split("\r\033[K")[1:]
    assert len(drawn) == 16
    assert max(map(len, drawn)) < 80
    assert drawn[7] == "train@a-0: step 8/60 reward 0.08 val EM 0.50 kl 0.02 40k/80k tokens 0:04 left"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": 1.25}, "step 3/60  loss 1.25"),
        ({"loss": 1.25, "accuracy": 0.5}, "step 3/60  accuracy 0.50  loss 1.25"),
        ({"em": 1 / 3}, "step 3/60  EM 0.33"),
        ({}, "step 3/60"),
    ],
)
def test_other_stages_say_the_figures_that_they_have(
    clock: Clock, metrics: dict[str, float], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Figures of an earlier step stay, for not every step measures all."""
    bar = Bar("base@0", 60, lambda step, metrics: None, unit="step")
    bar.log(1, metrics)
    clock.now += 8.0
    bar.log(3, {})
    assert capfd.readouterr().err.splitlines() == [f"{said}  3:48 left"]


def test_short_work_says_nothing(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    bar = Bar("evaluate@a-0", 8, lambda step, metrics: None)
    bar.show(0)
    clock.now += 4.0
    bar.show(8, {"em": 0.5})
    bar.close()
    assert capfd.readouterr().err == ""


def test_what_does_not_fit_is_shortened_before_it_is_left_out() -> None:
    parts = [("step 12/60", "12/60"), ("val EM 0.80", "EM 0.80"), ("kl 0.02", "")]
    found = [fitted(parts, columns) for columns in (33, 31, 24, 21, 15, 13)]
    assert found[0] == "step 12/60  val EM 0.80  kl 0.02"
    assert found[1] == "step 12/60 val EM 0.80 kl 0.02"
    assert found[2:4] == ["step 12/60  val EM 0.80", "12/60  EM 0.80"]
    assert found[4:] == ["12/60  EM 0.80", "12/60 EM 0.80"]
