"""Services are started in order and closed in reverse order, whatever fails on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.services import Resources, opened

RESOURCES = Resources(Path(), Path(), None, None, 1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recorded:
    """Writes down when it is started and closed."""

    record: list[str]
    role: Any
    starts: bool = True
    closes: bool = True
    needs_reference: bool = False

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[str]:
        if not self.starts:
            raise ValueError(f"{self.role} does not start")
        self.record.append(f"start {self.role}")
        try:
            yield f"service {self.role}"
        finally:
            self.record.append(f"close {self.role}")
            if not self.closes:
                raise ValueError(f"{self.role} does not close")


def kinds(record: list[str], **changes: dict[str, bool]) -> dict[Any, Recorded]:
    roles = ("log_probs", "turn_scores", "chat")
    return {role: Recorded(record, role, **changes.get(role, {})) for role in roles}


def test_all_are_started_and_closed_in_reverse_order() -> None:
    record: list[str] = []
    with opened(kinds(record), RESOURCES) as services:
        assert dict(services) == {role: f"service {role}" for role in ("log_probs", "turn_scores", "chat")}
        assert record == ["start log_probs", "start turn_scores", "start chat"]
    assert record[3:] == ["close chat", "close turn_scores", "close log_probs"]


def test_a_failing_run_closes_all() -> None:
    record: list[str] = []
    with pytest.raises(RuntimeError, match="the run broke"), opened(kinds(record), RESOURCES):
        raise RuntimeError("the run broke")
    assert record[3:] == ["close chat", "close turn_scores", "close log_probs"]


def test_a_service_that_does_not_start_closes_the_others() -> None:
    record: list[str] = []
    with (
        pytest.raises(ValueError, match="chat does not start"),
        opened(kinds(record, chat={"starts": False}), RESOURCES),
    ):
        raise AssertionError("no run without its services")
    assert record == ["start log_probs", "start turn_scores", "close turn_scores", "close log_probs"]


def test_a_service_that_does_not_close_keeps_no_other_open() -> None:
    record: list[str] = []
    with (
        pytest.raises(ValueError, match="turn_scores does not close"),
        opened(kinds(record, turn_scores={"closes": False}), RESOURCES),
    ):
        pass
    assert record[3:] == ["close chat", "close turn_scores", "close log_probs"]
