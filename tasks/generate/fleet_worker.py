"""A generator of a fleet: `python -m tasks.generate.fleet_worker` is started by `tasks.crew`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import crew
from tasks.generate import Adapters, Call, GeneratorConf, Sampling, WeightsError, proof
from tasks.generate.policy_folder import Kept
from tasks.model import Dtype

Orders = Sequence[tuple[str, tuple[Any, ...]]]
Logprobs = Sequence[Sequence[float]]


class _Told:
    """The policy under training as the stage describes it: a `Trainee` that knows the probes alone.

    Args:
        folder: of the policy.
        expected: what it computes for the probes.
    """

    causal_lm = None

    def __init__(self, folder: Path, expected: Logprobs) -> None:
        self.probes, self.expected = proof.probes(folder), expected

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Trainee.sequence_logprobs`."""
        by_probe = {tuple(ids): list(row) for ids, row in zip(self.probes, self.expected, strict=True)}
        return [by_probe[tuple(ids)] for ids in sequences]


class Worker:
    """What a fleet may ask for; see `FleetGenerator` and `FleetSession`.

    Args:
        stage: that asks.
    """

    def __init__(self, stage: crew.Stage) -> None:
        self._stage = stage
        self._kept = Kept()
        self._generator: Any = None
        self._sessions: dict[int, Any] = {}
        self._weights: list[tuple[str, Any]] = []
        self._policy: _Told | None = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        names = (
            "find_folder",
            "take_folder",
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
        return {name: self._ending_with_engine(getattr(self, name)) for name in names}

    def _ending_with_engine(self, command: Callable[..., Any]) -> Callable[..., Any]:
        """The command; if the generator's own process has died, this one ends, and others play its rows."""

        def run(*arguments: Any) -> Any:
            try:
                return command(*arguments)
            finally:
                if getattr(self._generator, "is_lost", False):
                    print("the engine of this generator has died", flush=True)
                    os._exit(1)  # In an orderly end, libraries would wait for the engine.

        return run

    def find_folder(self, name: str) -> str | None:
        """See `Kept.find`."""
        return self._kept.find(name)

    def take_folder(self, name: str) -> str:
        """See `Kept.take`."""
        return self._kept.take(name, self._stage.taken())

    def start(self, folder: str, conf: GeneratorConf, dtype: Dtype, threads: int, expected: Logprobs | None) -> float:
        """Load the policy in a folder of this host; returns how far its logprobs may be from the policy's.

        Args:
            folder: with weights and tokenizer.
            conf: of the generator.
            dtype: of the trainer's forward passes.
            threads: of this process.
            expected: what the policy under training computes for the probes; None where there is none.
        """
        from tasks.device import take_turn, use_threads

        take_turn(self._stage.number, getattr(conf, "tensor_parallel_size", 1))
        use_threads(threads)
        self._policy = None if expected is None else _Told(Path(folder), expected)
        self._generator = conf.start(Path(folder), dtype, self._policy)
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

    def end_weights(self, expected: Logprobs | None, outline: Adapters | None) -> str | None:
        """Take them over.

        Args:
            expected: what the policy now computes for the probes.
            outline: of adapters, if what came are their factors.

        Returns:
            what went wrong.
        """
        weights, self._weights = self._weights, []
        if self._policy is not None and expected is not None:
            self._policy.expected = expected
        try:
            self._generator.update_weights(weights if outline is None else replace(outline, factors=weights))
        except WeightsError as error:
            return str(error)
        return None

    def probe(self, probes: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of `ids[1:]` for each of these texts."""
        return [self._generator.probe(ids) for ids in probes]

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()


if __name__ == "__main__":
    crew.work(lambda stage: Worker(stage).commands())
