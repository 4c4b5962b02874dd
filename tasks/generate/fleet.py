"""Several generators as one: each plays some of the prompts, in a process of its own.

All rows of a prompt are with one generator, which reads the prompt once. Their generators' rows know nothing of one
another (`tasks/generate/rows.py`), so the number of generators is no part of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt

from tasks import cluster
from tasks.crew import Crew
from tasks.generate import Call, Sampling, Trainee, Weights, WeightsError, require_prompts
from tasks.model import Dtype

_MODULE = "tasks.generate.fleet_worker"
PROBE = (3, 1, 4, 1, 5, 9, 2, 6)
TOLERANCE = 1e-3
"""Largest distance of a log-probability of the probe from the policy's in float32."""


class FleetGenerator:
    """See `Generator`.

    Args:
        crew: the generators.
        trainee: the policy under training, if there is one.
        tolerance: of a log-probability after new weights.
    """

    shares_weights = False
    plays_apart = True
    rows_are_free = True

    def __init__(self, crew: Crew, trainee: Trainee | None, tolerance: float) -> None:
        self.crew, self.trainee, self.tolerance = crew, trainee, tolerance
        self.num_sessions = 0

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> FleetSession:
        """See `Generator.open`."""
        require_prompts(prompts, max_total_tokens)
        self.num_sessions += 1
        return FleetSession(self, self.num_sessions, prompts, copies, sampling, max_total_tokens)

    def update_weights(self, weights: Weights) -> None:
        """See `Generator.update_weights`; each generator then computes what the policy computes, or this raises."""
        size = len(self.crew)
        self.crew.call("begin_weights", [()] * size)
        for name, tensor in weights:
            self.crew.call("weight", [(name, tensor.detach().cpu())] * size)
        self.crew.call("end_weights", [()] * size)
        self._prove()

    def _prove(self) -> None:
        if self.trainee is None:
            return
        (wanted,) = self.trainee.sequence_logprobs([PROBE])
        for rank, found in enumerate(self.crew.call("logprobs", [(PROBE,)] * len(self.crew))):
            gap = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
            if not gap <= self.tolerance:
                raise WeightsError(
                    f"generator {rank} computes log-probabilities that are up to {gap:.2g} from the policy's after it "
                    f"got new weights, expected at most {self.tolerance:g}."
                )

    def sleep(self) -> None:
        """Does nothing: the generators run on processors."""

    def wake(self) -> None:
        """Does nothing, because `sleep` frees nothing."""

    def shutdown(self) -> None:
        """End the processes."""
        self.crew.close()


class FleetSession:
    """See `FreeSession`. Rows have the same numbers here and in the session of the generator that plays them."""

    def __init__(
        self,
        owner: FleetGenerator,
        number: int,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        self._crew, self._number = owner.crew, number
        self.num_prefilled = self.num_generated = 0
        self._owner: list[int] = []  # By row, the generator that plays it.
        self._open: list[set[int]] = [set() for _ in range(len(self._crew))]  # By generator, its rows.
        self._orders: list[list[tuple[str, tuple[Any, ...]]]] = [[] for _ in range(len(self._crew))]
        self._begun: list[set[int]] = [set() for _ in range(len(self._crew))]
        self._busy: set[int] = set()
        self._call("open", [(number, sampling, max_total_tokens)] * len(self._crew))
        self.extend(prompts, copies)

    def extend(self, prompts: Sequence[Sequence[int]], copies: int) -> list[int]:
        """See `FreeSession.extend`; the generator with the fewest rows gets the next prompt."""
        numbers = []
        for prompt in prompts:
            rank = min(range(len(self._open)), key=lambda one: (len(self._open[one]), one))
            first = len(self._owner)
            new = range(first, first + copies)
            self._owner += [rank] * copies
            self._open[rank] |= set(new)
            self._orders[rank].append(("extend", ([list(prompt)], copies, list(new))))
            numbers += new
        return numbers

    def submit(self, row: int, max_new_tokens: int) -> None:
        """See `FreeSession.submit`."""
        rank = self._owner[row]
        self._begun[rank].add(row)
        self._orders[rank].append(("submit", (row, max_new_tokens)))

    def advance(self) -> list[tuple[int, Call]]:
        """See `FreeSession.advance`; each generator writes until one of its calls is over."""
        for rank, begun in enumerate(self._begun):
            if begun and rank not in self._busy:
                self._busy.add(rank)
                self._crew.tell(rank, "advance", (self._number, self._taken(rank)))
        over: list[tuple[int, Call]] = []
        while not over and self._busy:
            for rank, (calls, read, written) in self._crew.hear():
                self._busy.discard(rank)
                self._begun[rank] -= {row for row, _ in calls}
                self.num_prefilled += read
                self.num_generated += written
                over += calls
        return over

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`."""
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)}: expected different rows.")
        for row, budget in zip(rows, max_new_tokens, strict=True):
            self.submit(row, budget)
        calls: dict[int, Call] = {}
        while len(calls) < len(rows):
            calls |= dict(self.advance())
        return [calls[row] for row in rows]

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`."""
        for row, ids in zip(rows, token_ids, strict=True):
            self._orders[self._owner[row]].append(("append", ([row], [list(ids)])))

    def fork(self, row: int, times: int) -> list[int]:
        """See `Session.fork`."""
        rank, first = self._owner[row], len(self._owner)
        new = list(range(first, first + times))
        self._owner += [rank] * times
        self._open[rank] |= set(new)
        self._orders[rank].append(("fork", (row, times, new)))
        return new

    def close(self, rows: Sequence[int]) -> None:
        """See `Session.close`."""
        for row in rows:
            rank = self._owner[row]
            self._open[rank].discard(row)
            self._orders[rank].append(("close", ([row],)))
        if not any(self._open):
            self._call("close", [(self._number,)] * len(self._crew))

    def _taken(self, rank: int) -> list[tuple[str, tuple[Any, ...]]]:
        """What a generator is to do before it goes on."""
        orders, self._orders[rank] = self._orders[rank], []
        return orders

    def _call(self, command: str, given: Sequence[Any]) -> None:
        while self._busy:  # A generator that still writes for rows that were closed.
            for rank, _ in self._crew.hear():
                self._busy.discard(rank)
        self._crew.call(command, given)


@dataclass(frozen=True)
class FleetConf:
    """Several generators of a kind whose rows are free.

    Attributes:
        generators: number of processes; no part of a result.
    """

    generators: PositiveInt = 2

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> FleetGenerator:
        """See `GeneratorConf.start`."""
        hosts = cluster.load()
        threads = max(1, torch.get_num_threads() // self.generators)
        crew = Crew(_MODULE, self.generators, hosts)
        try:
            crew.call("start", [(str(folder.absolute()), dtype, threads)] * self.generators)
        except BaseException:
            crew.close()
            raise
        return FleetGenerator(crew, trainee, TOLERANCE)


PART = FleetConf
