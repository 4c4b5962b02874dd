"""A generator of a fleet: `python -m tasks.generate.fleet_worker` is started by `tasks.crew`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks import crew
from tasks.generate import Call, Sampling
from tasks.model import Dtype

Orders = Sequence[tuple[str, tuple[Any, ...]]]


class Worker:
    """What a fleet may ask for; see `FleetGenerator` and `FleetSession`."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._sessions: dict[int, Any] = {}
        self._weights: list[tuple[str, Any]] = []

    def commands(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        names = ("start", "open", "advance", "close", "begin_weights", "weight", "end_weights", "logprobs")
        return {name: getattr(self, name) for name in names}

    def start(self, folder: str, dtype: Dtype, threads: int) -> None:
        """Load the policy in a folder of this host."""
        from tasks.device import use_threads
        from tasks.generate.rows import RowsConf

        use_threads(threads)
        self._generator = RowsConf().start(Path(folder), dtype)

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

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `ids[1:]`."""
        import torch

        with torch.inference_mode():
            tensor = torch.tensor([list(ids)], device=self._generator.model.device)
            table = self._generator.model(tensor, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found: list[float] = table.gather(-1, tensor[0, 1:, None])[:, 0].tolist()
        return found


if __name__ == "__main__":
    crew.work(lambda stage: Worker().commands())
