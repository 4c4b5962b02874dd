"""A worker of the DeepSpeed engine: it holds its part of the models under training, and does what the engine says.

`python -m tasks.engine.deepspeed_worker` is started by `tasks.crew`. It needs no file of the run: configuration and
weights come from the engine, so it may run on a host that does not see this host's files.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tasks import crew, device, limits
from tasks.engine import Objective, Training
from tasks.limits import Limit
from tasks.rl.experience import Experience
from tasks.supervised import Supervision

_SENT_AT_ONCE = 2**26
"""Bytes of weights; a larger tensor travels alone."""


@dataclass(frozen=True)
class World:
    """What every worker is told before anything else.

    Attributes:
        size: number of workers.
        threads: of each, where it computes on a processor.
        interface: network device for the exchange between workers.
        timeout_s: longest wait of an exchange.
    """

    size: int
    threads: int
    interface: str
    timeout_s: float


class Worker:
    """The commands of the engine; see `DeepSpeedPolicy` for what they are for.

    Args:
        stage: the engine's side.
    """

    def __init__(self, stage: crew.Stage) -> None:
        self.stage = stage
        self._store: Any = None
        self._models: Any = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        """What the engine may ask for, by name."""
        return {
            "look": self.look,
            "meet": self.meet,
            "join": self.join,
            "build": self.build,
            "teach": self.teach,
            "read": self.read,
            "measure": self.measure,
            "update": self.update,
            "limit": self.limit,
            "weights": self.weights,
            "adapted": self.adapted,
            "factors": self.factors,
            "save": self.save,
            "load": self.load,
        }

    def look(self) -> tuple[str, str]:
        """Take the GPU of this worker's turn; returns `GPU` or `processor`, and the type that `auto` means there.

        All must be told this before they join: a group of both kinds, or of both types, would wait for ever.
        """
        device.take_turn(self.stage.number)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed would import torch's compiler, which takes 5 s.
        import torch

        from tasks.model import computes_in

        kind = "GPU" if torch.cuda.is_available() else "processor"
        found = computes_in("auto", torch.device("cuda" if kind == "GPU" else "cpu"))
        return kind, str(found).removeprefix("torch.")

    def meet(self, world: World, address: str) -> int:
        """Open the place where workers meet, on the host of the first; returns its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.create_server((address, 0)) as listener:
            port = int(listener.getsockname()[1])
            self._store = TCPStore(
                address, port, world.size, True, timedelta(seconds=world.timeout_s),
                wait_for_workers=False, master_listen_fd=listener.detach(),
            )  # fmt: skip
        return port

    def join(self, world: World, address: str, port: int) -> None:
        """Meet the others and form one group."""
        os.environ |= {"GLOO_SOCKET_IFNAME": world.interface, "NCCL_SOCKET_IFNAME": world.interface}
        os.environ |= {"RANK": str(self.stage.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "DS_ACCELERATOR": _accelerator()}

        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from tasks.device import use_threads

        use_threads(world.threads)
        timeout = timedelta(seconds=world.timeout_s)
        store = self._store or TCPStore(address, port, world.size, False, timeout)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend, store=store, rank=self.stage.rank, world_size=world.size, timeout=timeout
        )
        if torch.cuda.is_available():
            require_own_gpu(store, self.stage.rank, f"{socket.gethostname()} {device.gpus()[0]}")
        # These say that libraries call each other by old names, and that embeddings need no gradient.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        _start_deepspeed(backend)

    def build(self, config: Any, training: Training, zero: Any) -> None:
        """Make policy, critic and reference, and give them the weights that the first worker gets."""
        from tasks.engine import zero_models

        self._begin(zero_models.build(config, training, zero))

    def teach(self, kind: str, config: Any, told: Supervision, zero: Any) -> None:
        """Make the model of supervised training, and give it the weights that the first worker gets."""
        from tasks.engine import zero_models

        self._begin(zero_models.build_taught(kind, config, told, zero))

    def _begin(self, made: Any) -> None:
        from tasks.engine import zero_models

        self._models, models = made, made.of_start()
        for name, tensor in _spread(self.stage):
            for model in models:
                model.set_weight(name, tensor)
        for model in models:
            model.settle()
        zero_models.require_sharing(made)

    def read(self, which: str, batches: Sequence[Experience]) -> list[Any]:
        """Logprobs of policy or reference, or values of the critic, of each batch."""
        models = self._models
        outputs = models.read_reference(batches) if which == "reference" else models.trainees[which].read(batches)
        return [(output[0] if isinstance(output, tuple) else output).cpu() for output in outputs]

    def measure(self, which: str, batches: Sequence[Any]) -> list[dict[str, float]]:
        """Metrics of batches of supervised training."""
        outputs = self._models.trainees[which].read(batches)
        return [{name: float(value) for name, value in metrics.items()} for _, metrics in outputs]

    def update(
        self, which: str, batches: Sequence[Any], objective: Objective[Any] | None, lr: float | None = None
    ) -> Any:
        """One step; returns the reports of the batches, and the norm of the gradient."""
        return self._models.trainees[which].update(batches, objective, lr)

    def limit(self) -> Limit:
        """What this worker's device could do."""
        import torch

        there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return limits.of(there, self._models.policy.dtype)

    def weights(self) -> None:
        """Hand over every weight of the policy, adapters merged, or of the one model, from the first worker."""
        self._hand(self._models.merged())

    def adapted(self) -> tuple[tuple[str, ...], int, float]:
        """Names of adapted weights, rank and scale of their adapters."""
        adapted: tuple[tuple[str, ...], int, float] = self._models.adapted()
        return adapted

    def factors(self) -> None:
        """Hand over the policy's adapters from the first worker."""
        self._hand(self._models.factors())

    def save(self, which: str) -> dict[str, Any]:
        """Hand over the state of policy or critic."""
        trainee = self._models.trainees[which]
        self._hand(trainee.state())
        values: dict[str, Any] = trainee.values()
        return values

    def load(self, which: str, values: dict[str, Any]) -> None:
        """Inverse of `save`; the first worker gets the tensors."""
        trainee = self._models.trainees[which]
        trainee.begin_restore(values)
        for name, tensor in _spread(self.stage):
            trainee.restore(name, tensor)
        trainee.settle()

    def _hand(self, named: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in named:
            if self.stage.rank == 0:
                self.stage.hand((name, tensor.detach().cpu()))


def _spread(stage: crew.Stage) -> Iterator[tuple[str, Any]]:
    """Named tensors that the first worker takes from the engine, on all workers; a tensor is valid until the next.

    Small ones travel together: between hosts each message waits for an answer, whatever its size.
    """
    import torch
    from torch import distributed

    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    taken = stage.taken() if stage.rank == 0 else iter(())
    while True:
        parts = list(_some(taken))
        heads: list[Any] = [[(name, tensor.shape, tensor.dtype, tensor.nbytes) for name, tensor in parts]]
        distributed.broadcast_object_list(heads, 0)
        if not heads[0]:
            return

        num_bytes = sum(size for *_, size in heads[0])
        if stage.rank == 0:
            sent = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in parts]).to(there)
        else:
            sent = torch.empty(num_bytes, dtype=torch.uint8, device=there)
        del parts
        distributed.broadcast(sent, 0)

        first = 0
        for name, shape, dtype, size in heads[0]:
            piece = sent[first : first + size]
            # Numbers of four bytes cannot be read from an odd place, where one of another type came before.
            piece = piece.clone() if first % dtype.itemsize else piece
            yield name, piece.view(dtype).reshape(shape)
            first += size


def _some(taken: Iterator[Any]) -> Iterator[Any]:
    """The next tensors, until they are large enough to be sent."""
    size = 0
    while size < _SENT_AT_ONCE and (part := next(taken, None)) is not None:
        size += part[1].nbytes
        yield part


def require_own_gpu(store: Any, rank: int, own: str) -> None:
    """Tell the others which GPU this worker has, by host and id.

    Raises:
        ValueError: a worker before it has the same one: NCCL exchanges nothing within a GPU.
    """
    store.set(f"gpu/{rank}", own)
    for other in range(rank):
        if store.get(f"gpu/{other}").decode() == own:
            raise ValueError(
                f"it has the GPU of worker {other} ({own}), expected one for each worker. Lower `workers` of "
                "conf/engine, or let conf/cluster name more `devices` or hosts."
            )


def _accelerator() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _start_deepspeed(backend: str) -> None:
    """Let DeepSpeed use the group that exists; on a processor it compiles nothing, which would take a minute."""
    import deepspeed

    if backend == "gloo":
        known = deepspeed.ops.__compatible_ops__
        known.update(dict.fromkeys(known, False))
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)


if __name__ == "__main__":
    crew.work(lambda stage: Worker(stage).commands())
