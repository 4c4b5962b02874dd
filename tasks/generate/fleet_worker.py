"""A generator of a fleet: `python -m tasks.generate.fleet_worker` is started by `tasks.crew`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks import crew
from tasks.generate import Call, GeneratorConf, Sampling
from tasks.model import Dtype

Orders = Sequence[tuple[str, tuple[Any, ...]]]


class Worker:
    """What a fleet may ask for; see `FleetGenerator` and `FleetSession`.

    Args:
        number: of this generator among those of its host.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._generator: Any = None
        self._sessions: dict[int, Any] = {}
        self._weights: list[tuple[str, Any]] = []

    def commands(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        names = (
            "start",
            "open",
            "advance",
            "close",
            "begin_weights",
            "weight",
            "end_weights",
            "probe",
            "sleep",
            "wake",
        )
        return {name: getattr(self, name) for name in names}

    def start(self, conf: GeneratorConf, folder: str, dtype: Dtype, threads: int) -> float:
        """Load the policy in a folder of this host; returns how far its logprobs may be from the policy's."""
        from tasks.device import take_turn, use_threads

        take_turn(self._number, getattr(conf, "tensor_parallel_size", 1))
        use_threads(threads)
        self._generator = conf.start(Path(folder), dtype)
        return float(self._generator.tolerance)

    def open(self, number: int, sampling: Sampling, max_total_tokens: int) -> None:
        """A session without rows."""
        self._sessions[number] = self._generator.open([], 1, sampling, max_total_tokens)

    def advance(self, number: int, orders: Orders) -> list[tuple[int, Call]]:
        """Do this, and write until a call is over."""
        session = self._sessions[number]
        for order, arguments in orders:
            getattr(session, order)(*arguments)
        calls: list[tuple[int, Call]] = []
        while not calls:
            calls = session.advance()
        return calls

    def close(self, number: int) -> None:
        """Forget a session."""
        del self._sessions[number]

    def begin_weights(self) -> None:
        """New weights come, one by one."""
        self._weights = []

    def weight(self, name: str, tensor: Any) -> None:
        """One of them."""
        self._weights.append((name, tensor))

    def end_weights(self) -> None:
        """Take them over."""
        weights, self._weights = self._weights, []
        self._generator.update_weights(weights)

    def probe(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `ids[1:]`."""
        logprobs: list[float] = self._generator.probe(ids)
        return logprobs

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()


if __name__ == "__main__":
    crew.work(lambda stage: Worker(stage.number).commands())
