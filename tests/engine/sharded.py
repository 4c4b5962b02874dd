"""An engine double: rows are spread over workers, each with a copy of the model, as an engine for several GPUs does.

Workers are threads of this process. Each gets its micro-batches and the objective pickled, adds up its own gradients,
and takes the optimizer step on the sum of all workers' gradients. Nothing here is faster than the plain engine: it
shows that the protocol of `tasks.engine` and the training loop leave room for such an engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tasks.engine import Critic, Objective, Plan, Policy, Training, Update
from tasks.engine.plain import PlainCritic, PlainEngine, PlainPolicy
from tasks.rl.experience import Experience

T = TypeVar("T")


class _Sharded:
    """What policy and critic share.

    Args:
        workers: equal copies, each of which computes a part of every plan.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = workers
        self.rows_of: list[list[int]] = [[] for _ in workers]  # Rows that each worker has been given so far.

    def each(self, work: Callable[[Any, Any], T], given: Sequence[Any]) -> list[T]:
        """`work(worker, what it is given)` of all workers at once; what is given travels pickled."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            sent = [pickle.loads(pickle.dumps(one)) for one in given]
            return list(pool.map(work, self.workers, sent))

    def shards(self, plan: Plan) -> list[list[list[int]]]:
        """The micro-batches of each worker, dealt in turn; with few of them a worker has none."""
        shards = [[list(rows) for rows in plan[number :: len(self.workers)]] for number in range(len(self.workers))]
        for seen, shard in zip(self.rows_of, shards, strict=True):
            seen += [row for rows in shard for row in rows]
        return shards

    def table(self, name: str, experience: Experience, plan: Plan, *more: Any) -> Tensor:
        """[N, T]: each worker fills the rows of its shard."""
        given = [(experience, shard, *more) for shard in self.shards(plan)]
        return torch.stack(self.each(lambda worker, args: getattr(worker, name)(*args), given)).sum(0)

    def update(self, experience: Experience, plan: Plan, objective: Objective[Any]) -> Update:
        """See `Policy.update`."""

        def accumulate(worker: Any, args: tuple[Experience, list[list[int]], Objective[Any]]) -> Any:
            received, shard, aim = args
            old = torch.zeros_like(received.rewards) if aim.is_first else None
            keep = () if old is None else (old,)
            return [worker.accumulate(received, rows, aim, *keep) for rows in shard], old

        done = self.each(accumulate, [(experience, shard, objective) for shard in self.shards(plan)])
        self.reduce_gradients()
        norms = [worker.step() for worker in self.workers]
        assert len(set(norms)) == 1, "the workers took different steps"

        by_worker = [iter(metrics) for metrics, _ in done]
        metrics = tuple(next(by_worker[number % len(by_worker)]) for number in range(len(plan)))
        old = torch.stack([old for _, old in done]).sum(0) if objective.is_first else None
        return Update(metrics, norms[0], old)

    def reduce_gradients(self) -> None:
        """Every worker gets the sum of all workers' gradients; one without rows has none to give."""
        for name in self.workers[0].trained:
            parameters = [worker.trained[name] for worker in self.workers]
            given = [p.grad for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(given[1:], given[0].clone()) if given else None

    def save(self, folder: Path) -> None:
        """Each worker writes files of its own."""
        for number, worker in enumerate(self.workers):
            worker.save(folder / f"worker-{number}")

    def load(self, folder: Path) -> None:
        """See `Policy.load`."""
        for number, worker in enumerate(self.workers):
            worker.load(folder / f"worker-{number}")


class ShardedPolicy(_Sharded):
    """See `Policy`; its model does not live in one place, so a generator needs a copy of its own."""

    causal_lm = None
    workers: Sequence[PlainPolicy]

    @property
    def trained(self) -> dict[str, Any]:
        return self.workers[0].trained

    def logprobs(self, experience: Experience, plan: Plan, reference: bool = False) -> Tensor:
        return self.table("logprobs", experience, plan, reference)

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.workers[0].sequence_logprobs(sequences)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one at a time, in memory that is used again for the next."""
        for name, tensor in self.workers[0].weights():
            gathered = tensor.clone()
            yield name, gathered
            gathered.fill_(float("nan"))

    def adapters(self) -> None:
        """A generator gets all weights."""

    def export(self, folder: Path) -> None:
        self.workers[0].export(folder)


class ShardedCritic(_Sharded):
    """See `Critic`."""

    workers: Sequence[PlainCritic]

    @property
    def trained(self) -> dict[str, Any]:
        return self.workers[0].trained

    def values(self, experience: Experience, plan: Plan) -> Tensor:
        return self.table("values", experience, plan)


@dataclass(frozen=True)
class ShardedEngine:
    """See `Engine`.

    `num_workers`: that share the rows.
    """

    num_workers: int = 2

    @contextmanager
    def open(self, folder: Path, training: Training) -> Iterator[tuple[Policy, Critic | None]]:
        """See `Engine.open`."""
        with ExitStack() as stack:
            opened = (PlainEngine().open(folder, training) for _ in range(self.num_workers))
            workers = [stack.enter_context(one) for one in opened]
            critics = [critic for _, critic in workers if critic is not None]
            yield ShardedPolicy([policy for policy, _ in workers]), ShardedCritic(critics) if critics else None


PART = ShardedEngine
