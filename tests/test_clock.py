"""Seconds by part: nested ones count once, a failure counts, and a run's parts cover it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tasks.clock import PARTS, Clock
from tests.tiny import make_trainer


class Time:
    """Seconds that pass when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def goes(self, seconds: float) -> None:
        self.now += seconds


def test_seconds_of_a_part_inside_another_one_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passing = Clock(), Time(monkeypatch)
    for _ in range(2):
        with clock("play"):
            passing.goes(1)
            with clock("search"):
                passing.goes(10)
                with clock("score"):
                    passing.goes(100)
            with clock("search"):
                passing.goes(20)
            passing.goes(2)
    assert clock.take() == {"play": 6, "search": 60, "score": 200}
    assert clock.take() == {}


def test_a_part_that_fails_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passing = Clock(), Time(monkeypatch)

    def fail() -> None:
        passing.goes(3)
        raise KeyError

    with pytest.raises(KeyError), clock("play"), clock("search"):
        fail()
    with clock("learn"):
        passing.goes(4)
    assert clock.take() == {"play": 0, "search": 3, "learn": 4}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_parts_of_a_run_are_known_and_cover_most_of_it(algorithm: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    trainer = make_trainer(tmp_path, algorithm, share=False, log=lambda step, metrics: rows.append(metrics))
    started = time.perf_counter()
    progress = trainer.run()
    taken = time.perf_counter() - started

    assert progress.seconds.keys() == set(PARTS)
    assert all(progress.seconds[part] > 0 for part in ("play", "logprobs", "learn", "hand_over", "validate", "save"))
    assert 0.5 * taken < sum(progress.seconds.values()) <= taken + 0.01
    assert {name for row in rows for name in row if name.startswith("seconds/")} == {f"seconds/{p}" for p in PARTS}
    assert not any(name.startswith("seconds/") for row in progress.history for name in row["metrics"])
