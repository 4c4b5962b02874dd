"""An engine of several processes, on one host or on several, among which DeepSpeed divides the models (ZeRO).

The stage stays one process, in which the loop, retrieval, rewards and all files are. It starts the workers
(`tasks/crew.py`), gives each its micro-batches of a plan, and puts together what they return. All make the same number
of passes: where a plan does not come out even, some are empty.

The files of a checkpoint are those of the plain engine, so any number of workers goes on from it, and the plain engine
as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from safetensors import safe_open
from torch import Tensor

from tasks import checkpoint, cluster
from tasks.crew import Crew
from tasks.engine import Critic, DivergedError, Objective, Plan, Policy, Training, Update
from tasks.engine.deepspeed_worker import World
from tasks.engine.zero import Stage, ZeroConf
from tasks.model import export_folder, outline
from tasks.rl.experience import Experience
from tasks.store import replacing_folder

_MODULE = "tasks.engine.deepspeed_worker"


class _Trained:
    """What policy and critic share.

    Args:
        crew: the workers.
        name: `policy` or `critic`.
    """

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew, self.name = crew, name

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

    def save(self, folder: Path) -> None:
        """See `Policy.save`."""
        *tensors, (values, *_) = self.crew.stream("save", [(self.name,)] * len(self.crew))
        checkpoint.write_state(folder, dict(tensors), values)

    def load(self, folder: Path) -> None:
        """See `Policy.load`."""
        tensors, values = checkpoint.read_state(folder)
        self.crew.call("load", [(self.name, values)] * len(self.crew), iter(tensors.items()))

    def _dealt(self, experience: Experience, plan: Plan) -> list[list[Experience]]:
        """The micro-batches of each worker, dealt in turn; empty ones where there are none left."""
        batches = [experience.rows(rows) for rows in plan]
        missing = -len(batches) % len(self.crew)
        if missing:
            shortest = experience.rows([int(experience.lengths.argmin())])
            empty = replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))
            batches += [empty] * missing
        return [batches[number :: len(self.crew)] for number in range(len(self.crew))]

    def _of(self, number: int, by_worker: Sequence[Sequence[Any]]) -> Any:
        """What was returned for one micro-batch of a plan."""
        return by_worker[number % len(self.crew)][number // len(self.crew)]


def _unrewarded(sequences: Sequence[Sequence[int]]) -> Experience:
    """Sequences as an experience in which the policy wrote all tokens but the first."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    table = torch.zeros(len(sequences), int(lengths.max()))
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(ids)) for ids in sequences], batch_first=True)
    places = torch.arange(ids.shape[1])
    written = (places >= 1) & (places < lengths[:, None])
    names = tuple(str(number) for number in range(len(sequences)))
    return Experience(ids, lengths, written, written, table, names, table)


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

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`."""
        for part in self.crew.stream("weights", [()] * len(self.crew)):
            if isinstance(part, tuple):
                yield part

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

    workers: PositiveInt = 2
    stage: Stage = 2
    offload: bool = False
    bucket: PositiveInt = 2**26
    timeout_s: PositiveFloat = 600.0

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
        """
        model, _, _ = outline(folder)
        hosts = cluster.load()
        places = hosts.places(self.workers)
        threads = max(1, torch.get_num_threads() // self.workers)
        with Crew(_MODULE, self.workers, hosts, reports=[DivergedError]) as crew:
            worlds = [World(self.workers, threads, place.interface, self.timeout_s) for place in places]
            port, *_ = crew.call("meet", [(world, places[0].address) for world in worlds[:1]])
            crew.call("join", [(world, places[0].address, port) for world in worlds])

            zero = ZeroConf(self.used_stage, self.offload, self.bucket)
            given = [(model.config, training, zero)] * self.workers
            crew.call("build", given, _stored(folder))
            yield DeepSpeedPolicy(crew, folder), DeepSpeedCritic(crew, "critic") if training.critic else None


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight in the files of a model folder, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


PART = DeepSpeedEngine
