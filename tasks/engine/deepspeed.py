"""An engine of several processes, on one host or on several, among which DeepSpeed divides the models (ZeRO).

The stage stays one process, in which the loop, retrieval, rewards and all files are. It starts the workers
(`tasks/crew.py`), gives each its micro-batches of a plan, and puts together what they return. All make the same number
of passes: where a plan does not come out even, some are empty.

The files of a checkpoint are those of the plain engine, so any number of workers goes on from it, and the plain engine
as well. Supervised training (`tasks/supervised.py`) is divided alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from tasks import checkpoint, cluster, libraries
from tasks.crew import Crew
from tasks.engine import Critic, DivergedError, Objective, Plan, Policy, Training, Update
from tasks.engine.deepspeed_worker import World
from tasks.engine.zero import Examples, Stage, ZeroConf
from tasks.generate import Adapters
from tasks.limits import Limit
from tasks.model import Dtype, export_folder, outline, read_weights
from tasks.rl.experience import Experience
from tasks.store import replacing_folder
from tasks.supervised import Step, Supervision, Task

_MODULE = "tasks.engine.deepspeed_worker"


class _Divided:
    """A model under training by workers.

    Args:
        crew: the workers.
        name: `policy` or `critic`; a model of supervised training stands in the place of the policy.
    """

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew, self.name = crew, name

    def save(self, folder: Path) -> None:
        """See `Policy.save`."""
        *tensors, (values, *_) = self.crew.stream("save", [(self.name,)] * len(self.crew))
        checkpoint.write_state(folder, dict(tensors), values, are_copies=True)  # Workers have sent them.

    def load(self, folder: Path) -> None:
        """See `Policy.load`."""
        tensors, values = checkpoint.read_state(folder)
        self.crew.call("load", [(self.name, values)] * len(self.crew), iter(tensors.items()))

    def _of(self, number: int, by_worker: Sequence[Sequence[Any]]) -> Any:
        """What was returned for one micro-batch of a plan."""
        return by_worker[number % len(self.crew)][number // len(self.crew)]


class _Trained(_Divided):
    """What policy and critic share."""

    def update(self, experience: Experience, plan: Plan, objective: Objective[Any]) -> Update:
        """See `Policy.update`."""
        given = [(self.name, batches, objective) for batches in self._dealt(experience, plan)]
        done = self.crew.call("update", given)
        reports = [self._of(number, [found for found, _ in done]) for number in range(len(plan))]

        old = None
        if objective.is_first:
            old = _table(experience, plan, [logprobs for _, logprobs in reports])
        return Update(tuple(metrics for metrics, _ in reports), done[0][1], old)

    def read(self, experience: Experience, plan: Plan, which: str) -> Tensor:
        """[N, T] of logprobs or values; 0 in rows outside the plan."""
        found = self.crew.call("read", [(which, batches) for batches in self._dealt(experience, plan)])
        return _table(experience, plan, [self._of(number, found) for number in range(len(plan))])

    def _dealt(self, experience: Experience, plan: Plan) -> list[list[Experience]]:
        """The micro-batches of each worker, dealt in turn; empty ones where there are none left."""
        batches = [experience.rows(rows) for rows in plan]
        missing = -len(batches) % len(self.crew)
        if missing:
            shortest = experience.rows([int(experience.lengths.argmin())])
            empty = replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))
            batches += [empty] * missing
        return [batches[number :: len(self.crew)] for number in range(len(self.crew))]


def _unrewarded(sequences: Sequence[Sequence[int]]) -> Experience:
    """Sequences as an experience in which the policy wrote all tokens but the first."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    table = torch.zeros(len(sequences), int(lengths.max()))
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(ids)) for ids in sequences], batch_first=True)
    places = torch.arange(ids.shape[1])
    written = (places >= 1) & (places < lengths[:, None])
    names = tuple(str(number) for number in range(len(sequences)))
    return Experience(ids, lengths, written, written, table, names, table)


def _handed(crew: Crew, command: str) -> Iterator[tuple[str, Tensor]]:
    """Named tensors that the workers hand over, such as every weight of the policy."""
    parts = crew.stream(command, [()] * len(crew))
    try:
        for part in parts:
            if isinstance(part, tuple):
                yield part
    finally:
        # Else, if the reader stops early, the next command would get the rest in place of its result.
        for _ in parts:
            pass


def _table(experience: Experience, plan: Plan, found: Sequence[Tensor]) -> Tensor:
    table = torch.zeros_like(experience.rewards)
    for rows, piece in zip(plan, found, strict=True):
        table[list(rows), : piece.shape[1]] = piece
    return table


class DeepSpeedPolicy(_Trained):
    """See `Policy`; no process holds the whole model, so a generator needs a copy of its own.

    Args:
        crew: the workers.
        folder: of the start policy, from which configuration and tokenizer are exported.
    """

    causal_lm = None

    def __init__(self, crew: Crew, folder: Path) -> None:
        super().__init__(crew, "policy")
        self.folder = folder

    def logprobs(self, experience: Experience, plan: Plan, reference: bool = False) -> Tensor:
        """See `Policy.logprobs`."""
        return self.read(experience, plan, "reference" if reference else "policy")

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Policy.sequence_logprobs`."""
        table = self.read(_unrewarded(sequences), [[row] for row in range(len(sequences))], self.name)
        return [row[1 : len(ids)].tolist() for row, ids in zip(table, sequences, strict=True)]

    def limits(self) -> list[Limit]:
        """See `Limited`; the workers measure at the same time."""
        return self.crew.call("limit", [()] * len(self.crew))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`."""
        return _handed(self.crew, "weights")

    def adapters(self) -> Adapters | None:
        """See `Policy.adapters`."""
        (names, rank, scale), *_ = self.crew.call("adapted", [()] * len(self.crew))
        return Adapters(names, rank, scale, _handed(self.crew, "factors")) if names else None

    def export(self, folder: Path) -> None:
        """See `Policy.export`; atomic."""
        model, tokenizer, _ = outline(self.folder)
        weights = dict(self.weights())
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        with replacing_folder(folder) as work:
            export_folder(model, tokenizer, work)


class DeepSpeedCritic(_Trained):
    """See `Critic`."""

    def values(self, experience: Experience, plan: Plan) -> Tensor:
        """See `Critic.values`."""
        return self.read(experience, plan, "critic")


class DeepSpeedLearner(_Divided):
    """See `Learner`. Dropout is off, since no two numbers of workers would draw it alike.

    Args:
        crew: the workers.
        model: whose weights they began with; in the memory of the host.
        task: what it learns.
    """

    def __init__(self, crew: Crew, model: Any, task: Task) -> None:
        super().__init__(crew, "policy")
        self.model, self.task = model, task

    def learn(self, batches: Sequence[Sequence[Any]], total: float, lr: float) -> Step:
        """See `Learner.learn`."""
        even, dealt = self._dealt(batches, total)
        done = self.crew.call("update", [(self.name, given, None, lr) for given in dealt])
        reports = [reports for reports, _ in done]
        return Step(tuple(self._of(number, reports) for number in range(len(even))), done[0][1])

    def measure(self, batches: Sequence[Sequence[Any]]) -> list[dict[str, float]]:
        """See `Learner.measure`."""
        even, dealt = self._dealt(batches, 1.0)
        reports = self.crew.call("measure", [(self.name, given) for given in dealt])
        return [self._of(number, reports) for number in range(len(even))]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        return _handed(self.crew, "weights")

    @torch.no_grad()
    def bring_back(self) -> None:
        """See `Learner.bring_back`; the model then has the dtype in which it computes, as after plain training."""
        parameters = dict(self.model.named_parameters())
        for name, weight in self.weights():
            parameters[name].data = weight

    def _dealt(
        self, batches: Sequence[Sequence[Any]], total: float
    ) -> tuple[list[Sequence[Any]], list[list[Examples]]]:
        """Micro-batches, and those of each worker: as many for each, and those that run together about as long."""
        even = evened(batches, len(self.crew), self.task.num_tokens)
        given = [Examples(examples, total) for examples in even]
        given += [Examples(even[-1][:1], total, counts=False)] * (-len(given) % len(self.crew))
        return even, [given[number :: len(self.crew)] for number in range(len(self.crew))]


def evened(batches: Sequence[Sequence[Any]], workers: int, num_tokens: Callable[[Any], int]) -> list[Sequence[Any]]:
    """Micro-batches in falling order of their tokens; the longest are cut in two until each worker has as many.

    Where none can be cut, they do not come out even.

    >>> evened([[1, 2], [9, 3, 7], [4]], 2, int)
    [[3, 7], [9], [4], [1, 2]]
    """

    def size(examples: Sequence[Any]) -> int:
        return sum(map(num_tokens, examples))

    even = sorted(batches, key=size, reverse=True)
    while len(even) % workers and any(len(examples) > 1 for examples in even):
        longest = next(examples for examples in even if len(examples) > 1)
        place = min(range(1, len(longest)), key=lambda end: abs(size(longest[:end]) - size(longest[end:])))
        even.remove(longest)
        even = sorted([*even, longest[:place], longest[place:]], key=size, reverse=True)
    return even


@dataclass(frozen=True)
class DeepSpeedEngine:
    """Several processes, each with its part of the models.

    Attributes:
        workers: number of processes. Where they run is said by a file of conf/cluster and is no part of a result.
        stage: what they divide: 0 nothing, 1 optimizer states, 2 gradients as well, 3 weights as well.
        offload: optimizer states and float32 weights stay in the memory of the host (a GPU then holds less).
        bucket: most numbers that are sent at once.
        timeout_s: longest wait of workers for one another.
    """

    requires = "deepspeed"

    workers: PositiveInt
    stage: Stage = 2
    offload: bool = False
    bucket: Annotated[int, Field(ge=1000)] = 2**26
    timeout_s: Annotated[float, Field(ge=1)] = 600.0

    @property
    def used_stage(self) -> Stage:
        """One worker divides nothing; DeepSpeed then only offloads, for which stage 2 is enough."""
        if self.workers > 1 or not self.stage:
            return self.stage
        return 2 if self.offload else 0

    @contextmanager
    def open(self, folder: Path, training: Training) -> Iterator[tuple[Policy, Critic | None]]:
        """See `Engine.open`.

        Raises:
            CrewError: a worker does not start, or died; later calls raise it as well.
            ValueError: workers compute on other kinds of devices, or in other types, than the first; or there is no
                DeepSpeed.
        """
        libraries.require(self.requires)
        model, _, _ = outline(folder)
        with self._workers(training.dtype) as crew:
            crew.call("build", [(model.config, training, self._zero)] * self.workers, read_weights(folder))
            policy = DeepSpeedPolicy(crew, folder)
            if self.used_stage == 3 and training.lora.rank:
                policy.sequence_logprobs(
                    [[0, 0]]
                )  # DeepSpeed 0.19 divides adapters again before a first backward pass.
            yield policy, DeepSpeedCritic(crew, "critic") if training.critic else None

    @contextmanager
    def learner(self, model: Any, told: Supervision) -> Iterator[DeepSpeedLearner]:
        """See `Divides.learner`; the model stays in the memory of the host.

        Raises:
            CrewError: as `open`.
        """
        with self._workers(told.dtype) as crew:
            given = (type(model).__name__, model.config, told, self._zero)
            crew.call("teach", [given] * self.workers, _held(model))
            yield DeepSpeedLearner(crew, model, told.task)

    @property
    def _zero(self) -> ZeroConf:
        return ZeroConf(self.used_stage, self.offload, self.bucket)

    @contextmanager
    def _workers(self, dtype: Dtype) -> Iterator[Crew]:
        """Workers that have met, and compute alike in this type."""
        hosts = cluster.load()
        places = hosts.places(self.workers)
        threads = max(1, torch.get_num_threads() // self.workers)
        torch.cuda.empty_cache()  # A worker may share the GPU on which this process has used a model before.
        with Crew(_MODULE, self.workers, hosts, reports=[DivergedError]) as crew:
            _require_alike(crew, dtype)
            worlds = [World(self.workers, threads, place.interface, self.timeout_s) for place in places]
            port, *_ = crew.call("meet", [(world, places[0].address) for world in worlds[:1]])
            crew.call("join", [(world, places[0].address, port) for world in worlds])
            yield crew


def _held(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of every weight of a model, one at a time; what is sent would else be all of a shared file."""
    for name, weight in model.named_parameters():
        yield name, weight.detach().to("cpu", copy=True)


def _require_alike(crew: Crew, asked: Dtype) -> None:
    """Raise the ValueError for workers that compute on another kind of device, or in another type, than the first.

    A processor without instructions for bfloat16 computes in float32. Where all do, the run is one in float32.
    """
    (first_kind, first_type), *others = crew.call("look", [()] * len(crew))
    first, *members = crew.members
    for member, (kind, dtype) in zip(members, others, strict=True):
        if kind != first_kind:
            raise ValueError(
                f"{member.name} computes on a {kind}, and {first.name} on a {first_kind}: expected the same of all. "
                "Name hosts in conf/cluster that are alike."
            )
        if dtype != first_type and asked != "float32":
            raise ValueError(
                f"{member.name} computes in {dtype}, and {first.name} in {first_type}, because not every {kind} has "
                "instructions for bfloat16: expected one type. Set `dtype: float32` in conf/scale, or name "
                "hosts in conf/cluster that are alike."
            )


PART = DeepSpeedEngine
