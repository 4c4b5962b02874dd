"""What a service does for a run: calls, tokens, failures, and what this process waited for it.

Calls, tokens and failures belong to the work: a run that is repeated, or killed and resumed, has the same ones. Hits
and seconds belong to the process: a second run is answered from replies that were kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tasks.store import read_json, write_json

WORK = ("calls", "tokens", "failures")
PROCESS = ("hits", "seconds")


@dataclass
class Usage:
    """Counts of one service.

    Attributes:
        calls: requests that got an answer: conversations, trajectories, pairs or queries.
        tokens: of these requests and answers, as far as the service counts them.
        failures: answers that could not be used: refused, or in another form than the one that was asked for.
        hits: calls that were answered from a cache or a recording.
        seconds: that the caller waited.
    """

    calls: int = 0
    tokens: int = 0
    failures: int = 0
    hits: int = 0
    seconds: float = 0.0

    @contextmanager
    def waiting(self, calls: int = 0, tokens: int = 0) -> Iterator[None]:
        """Count these calls when the block ends without an error, and its seconds in any case."""
        started = time.perf_counter()
        try:
            yield
            self.calls += calls
            self.tokens += tokens
        finally:
            self.seconds += time.perf_counter() - started

    def copy(self) -> Usage:
        """A copy, from which `since` takes differences."""
        return Usage(**{field.name: getattr(self, field.name) for field in fields(self)})

    def since(self, before: Usage) -> Usage:
        """What was counted after `before` was copied."""
        return Usage(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def add(self, other: Usage) -> None:
        """Add the counts of `other`."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def named(self, names: tuple[str, ...]) -> dict[str, float]:
        """Some of the counts; seconds to the millisecond."""
        return {name: round(getattr(self, name), 3) for name in names}


def usages(services: Mapping[str, Any]) -> dict[str, Usage]:
    """Role -> the counts of its service, for every service that counts."""
    found = {role: getattr(service, "usage", None) for role, service in services.items()}
    return {role: usage for role, usage in found.items() if isinstance(usage, Usage)}


class ChunkUsage:
    """What services did for each chunk of a stage's work, kept beside the file of the chunk.

    So a stage that was killed and resumed counts every chunk once, also those of the process that was killed.
    """

    def __init__(self, services: Mapping[str, Any]) -> None:
        self.total: dict[str, Usage] = {}
        self._services = services

    @contextmanager
    def counting(self, chunk: Path) -> Iterator[None]:
        """Keep what the block asks of the services; only then may the caller write `chunk`."""
        before = {role: usage.copy() for role, usage in usages(self._services).items()}
        yield
        used = {role: usage.since(before[role]) for role, usage in usages(self._services).items()}
        if used:
            write_json(_beside(chunk), {role: asdict(usage) for role, usage in used.items()})

    def add(self, chunk: Path) -> None:
        """Add the counts of a finished chunk."""
        if usages(self._services):
            for role, counts in read_json(_beside(chunk)).items():
                self.total.setdefault(role, Usage()).add(Usage(**counts))


def _beside(chunk: Path) -> Path:
    return chunk.with_suffix(".usage.json")


def work_of(used: Mapping[str, Usage], measured: dict[str, Any]) -> dict[str, Any]:
    """For a stage's summary the counts that belong to the work; those of the process go into `measured`, its ledger.

    Both have no key for a stage without services.
    """
    if not used:
        return {}
    measured["services"] = {role: usage.named(PROCESS) for role, usage in used.items()}
    return {"services": {role: usage.named(WORK) for role, usage in used.items()}}


def named_by_role(used: Mapping[str, Usage], names: tuple[str, ...]) -> dict[str, float]:
    """Metrics of a step: `services/<role>/<name>`."""
    return {f"services/{role}/{name}": n for role, usage in used.items() for name, n in usage.named(names).items()}
