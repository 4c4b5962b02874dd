"""Several generators as one: each plays some of the prompts, in a process of its own.

All rows of a prompt are with one generator, which reads the prompt once. What a row writes follows from its own text
and draws, to the bit with generators whose rows know nothing of one another (`tasks/generate/rows.py`) and up to
rounding with vLLM. So the number of generators is no part of a result of the former.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt

from tasks import cluster, conf, parts
from tasks.crew import Crew
from tasks.generate import (
    Adapters,
    Call,
    GeneratorConf,
    Revived,
    Sampling,
    Trainee,
    Weights,
    WeightsError,
    checked,
    fleet_worker,
    handover,
    not_open,
    policy_folder,
    proof,
    require_prompts,
)
from tasks.generate.adapters import shapes_of
from tasks.model import Dtype

Logprobs = Sequence[Sequence[float]]


class FleetGenerator:
    """See `Generator`.

    A generator that dies is left out, and the others play its rows again. With the next weights another one takes its
    place. Nothing plays from the start of a hand-over or a sleep until every generator has proved its weights.

    Args:
        crew: the generators.
        conf: of each generator.
        folder: of the policy, on this host; other hosts get a copy.
        dtype: of the trainer's forward passes.
        threads: of each generator.
        trainee: the policy under training, if there is one.
    """

    shares_weights = False
    plays_apart = True
    rows_are_free = True

    def __init__(
        self, crew: Crew, conf: GeneratorConf, folder: Path, dtype: Dtype, threads: int, trainee: Trainee | None
    ) -> None:
        self.crew, self.trainee = crew, trainee
        self.num_sessions = 0
        self._probes = proof.probes(folder)
        self._shapes, self._sent = handover.stored_shapes(folder), proof.Sent(folder)
        self._is_proved, self._sleeps = True, False

        # One that takes another's place begins with the folder's weights too.
        self._folder, self._begin = folder, (conf, dtype, threads, self._expected())
        self.tolerance = max(filter(None, self._start(crew.there)))

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> FleetSession:
        """See `Generator.open`."""
        if self._sleeps:
            raise WeightsError("the fleet sleeps. Wake it, and give it the policy's weights.")
        if not self._is_proved:
            raise WeightsError(
                "the fleet holds unknown weights: it slept, or its last update failed. Give it new weights."
            )
        require_prompts(prompts, max_total_tokens)
        if self.trainee is None:  # All weights are those of the folder.
            self._replace_lost()
        self.num_sessions += 1
        return FleetSession(self.crew, self.num_sessions, prompts, copies, sampling, max_total_tokens)

    def update_weights(self, weights: Weights | Adapters) -> None:
        """See `Generator.update_weights`; each generator then computes what the policy computes, or this raises.

        Raises:
            WeightsError: as there. The fleet then opens no session until an update succeeds, because a generator that
                took another's place has the weights of the start.
        """
        if self._sleeps:
            raise WeightsError("the fleet sleeps and cannot take weights. Wake it first.")
        self._is_proved = False
        self._replace_lost()
        outline: Adapters | None = None
        if isinstance(weights, Adapters):
            given = checked(weights.factors, shapes_of(weights, self._shapes))
            outline = replace(weights, factors=())
        else:
            given = checked(weights, self._shapes)

        self._call("begin_weights")
        for name, tensor in self._sent.noted(given):
            self._call("weight", (name, tensor.detach().cpu()))

        expected = self._expected()
        for rank, fault in enumerate(self._call("end_weights", (expected, outline))):
            if fault is not None:
                raise WeightsError(f"generator {rank}: {fault}")
        self._prove(expected)
        self._is_proved = True
        self._sent.proved()

    def _expected(self) -> Logprobs | None:
        """What the policy under training computes for the probes."""
        return None if self.trainee is None else self.trainee.sequence_logprobs(self._probes)

    def _prove(self, expected: Logprobs | None) -> None:
        if expected is None:
            return
        for rank, computed in enumerate(self._call("probe", (self._probes,))):
            gap = 0.0 if computed is None else proof.largest_gap(computed, expected)
            if not gap <= self.tolerance:
                raise WeightsError(
                    f"generator {rank} computes log-probabilities that are up to {gap:.2g} from the policy's after it "
                    f"got new weights, expected at most {self.tolerance:g}.{self._sent.unchanged()}"
                )

    def _replace_lost(self) -> None:
        self._start(self.crew.replace_lost())

    def _start(self, ranks: Sequence[int]) -> list[Any]:
        folders = policy_folder.on_hosts(self.crew, ranks, self._folder)
        given = [(folders[rank], *self._begin) if rank in folders else None for rank in range(len(self.crew))]
        return self.crew.call("start", given)

    def _call(self, command: str, given: tuple[Any, ...] = ()) -> list[Any]:
        """Results of all generators; None of one that is lost."""
        return self.crew.call(command, [given] * len(self.crew))

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self._sleeps, self._is_proved = True, False
        self._call("sleep")

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._call("wake")
        self._sleeps = False

    def shutdown(self) -> None:
        """End the processes."""
        self.crew.close()


@dataclass
class _Row:
    """An open row.

    Attributes:
        rank: of the generator that plays it.
        read, pending, recent, calls: see `Revived`.
        budget: of the call that was begun; 0 where there is none.
    """

    rank: int
    read: list[tuple[int, ...]]
    pending: tuple[int, ...]
    recent: tuple[int, ...] = ()
    calls: int = 0
    budget: int = 0

    @property
    def total(self) -> int:
        """Tokens of its text."""
        return sum(map(len, self.read)) + len(self.pending)

    def reads(self, pieces: Sequence[tuple[int, ...]], pending: tuple[int, ...]) -> None:
        """What was pending, and further pieces, were read."""
        self.read += [piece for piece in (self.pending, *pieces) if piece]
        self.pending = pending


class FleetSession:
    """See `FreeSession`. Rows have the same numbers here and in the session of the generator that plays them.

    It knows the text of every row and counts tokens by it, so a generator's death changes neither text nor counts.
    """

    def __init__(
        self,
        crew: Crew,
        number: int,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        self._crew, self._number, self._longest = crew, number, max_total_tokens
        self.num_prefilled = self.num_generated = 0
        self._count = 0
        self._rows: dict[int, _Row] = {}
        self._orders: dict[int, list[tuple[str, tuple[Any, ...]]]] = {rank: [] for rank in crew.there}
        self._busy: set[int] = set()
        self._call("open", (number, sampling, max_total_tokens))
        self.extend(prompts, copies)

    def extend(self, prompts: Sequence[Sequence[int]], copies: int) -> list[int]:
        """See `FreeSession.extend`; the generator with the fewest rows gets the next prompt."""
        first = self._count
        for prompt in prompts:
            rank = self._freest()
            head = [tuple(prompt[:-1])] if len(prompt) > 1 else []
            new = self._added([_Row(rank, list(head), (prompt[-1],)) for _ in range(copies)])
            self._orders[rank].append(("extend", ([list(prompt)], copies, new)))
            self.num_prefilled += len(prompt) - 1 + copies
        return list(range(first, self._count))

    def submit(self, row: int, max_new_tokens: int) -> None:
        """See `FreeSession.submit`."""
        playing = self._open(row)
        playing.budget = min(max_new_tokens, self._longest - playing.total)
        self._orders[playing.rank].append(("submit", (row, max_new_tokens)))

    def advance(self) -> list[tuple[int, Call]]:
        """See `FreeSession.advance`; each generator writes until one of its calls is over."""
        over: list[tuple[int, Call]] = []
        while not over:
            for rank in {row.rank for row in self._rows.values() if row.budget} - self._busy:
                self._busy.add(rank)
                self._crew.tell(rank, "advance", (self._number, self._taken(rank)))
            if not self._busy:
                break
            for rank, calls in self._crew.hear():
                self._busy.discard(rank)
                if calls is None:
                    self._leave(rank)
                else:
                    over += calls
        for number, call in over:
            self._written(self._rows[number], call)
        return over

    def _written(self, row: _Row, call: Call) -> None:
        """Record a call that is over."""
        ids, is_cut = call.token_ids, call.stopped or len(call.token_ids) == row.budget
        row.recent += ids
        pieces = [(token,) for token in ids]
        row.reads(pieces[:-1] if is_cut else pieces, ids[-1:] if is_cut else ())
        self.num_generated += len(ids) + (not is_cut)  # Else it drew the end of text as well.
        row.calls += 1
        row.budget = 0

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
        for number, ids in zip(rows, token_ids, strict=True):
            row = self._open(number)
            row.pending += tuple(ids)
            row.recent = ()
            self._orders[row.rank].append(("append", ([number], [list(ids)])))
            self.num_prefilled += len(ids)

    def fork(self, row: int, times: int) -> list[int]:
        """See `Session.fork`."""
        parent = self._open(row)
        if len(parent.pending) > 1:  # All but the newest token is read once for all.
            newest, parent.pending = parent.pending[-1:], parent.pending[:-1]
            parent.reads([], newest)
        new = self._added([replace(parent, read=list(parent.read)) for _ in range(times)])
        self._orders[parent.rank].append(("fork", (row, times, new)))
        self.num_prefilled += times * len(parent.pending)
        return new

    def close(self, rows: Sequence[int]) -> None:
        """See `Session.close`."""
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None:
                self._orders[row.rank].append(("close", ([number],)))
        if not self._rows:
            self._call("close", (self._number,))

    def _open(self, row: int) -> _Row:
        if row not in self._rows:
            raise ValueError(not_open(row, self._count, len(self._rows)))
        return self._rows[row]

    def _added(self, rows: Sequence[_Row]) -> list[int]:
        """Numbers of new rows."""
        new = list(range(self._count, self._count + len(rows)))
        self._rows |= dict(zip(new, rows, strict=True))
        self._count += len(rows)
        return new

    def _freest(self) -> int:
        """The generator with the fewest open rows, of equal ones the first."""
        counts = Counter(row.rank for row in self._rows.values())
        return min(self._orders, key=lambda rank: (counts[rank], rank))

    def _leave(self, lost: int) -> None:
        """Give the rows of a generator that is lost to the others, which read their texts again."""
        self._orders.pop(lost, None)
        revived: dict[int, list[Revived]] = {}
        begun = []
        for number, row in self._rows.items():
            if row.rank == lost:
                row.rank = self._freest()
                again = Revived(number, tuple(row.read), row.pending, row.recent, row.calls)
                revived.setdefault(row.rank, []).append(again)
                begun += [(row.rank, number, row.budget)] if row.budget else []
        for rank, rows in revived.items():
            self._orders[rank].append(("revive", (rows,)))
        for rank, number, budget in begun:
            self._orders[rank].append(("submit", (number, budget)))

    def _taken(self, rank: int) -> list[tuple[str, tuple[Any, ...]]]:
        """What a generator is to do before it goes on."""
        orders, self._orders[rank] = self._orders[rank], []
        return orders

    def _call(self, command: str, given: tuple[Any, ...]) -> None:
        while self._busy:  # A generator that still writes for rows that were closed.
            for rank, _ in self._crew.hear():
                self._busy.discard(rank)
        self._crew.call(command, [given if rank in self._orders else None for rank in range(len(self._crew))])


@dataclass(frozen=True)
class FleetConf:
    """Several generators of a kind whose rows are free.

    Attributes:
        generators: number of processes.
        of: kind and settings of each: `rows`, or `vllm`.
    """

    generators: PositiveInt
    of: dict[str, Any] = field(default_factory=lambda: {parts.KIND: "rows"})

    def __post_init__(self) -> None:
        conf.require(self.of.get(parts.KIND) in ("rows", "vllm"), "of: kind", self.of.get(parts.KIND), "rows or vllm")
        self.loads()

    def loads(self) -> GeneratorConf:
        """The settings of each generator."""
        made: GeneratorConf = parts.make("generate", self.of, "of")
        return made

    def start(self, folder: Path, dtype: Dtype, trainee: Trainee | None = None) -> FleetGenerator:
        """See `GeneratorConf.start`."""
        hosts = cluster.load()
        threads = max(1, torch.get_num_threads() // self.generators)
        crew = Crew(fleet_worker.__name__, self.generators, hosts, may_lose=True)
        try:
            return FleetGenerator(crew, self.loads(), folder, dtype, threads, trainee)
        except BaseException:
            crew.close()
            raise


PART = FleetConf
