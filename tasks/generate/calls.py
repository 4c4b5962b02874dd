"""Sessions that play whole calls."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.generate import Call


class WholeCalls:
    """`Session.submit` and `Session.advance` for a session whose `generate` plays whole calls."""

    def submit(self, row: int, max_new_tokens: int) -> None:
        """See `Session.submit`."""
        self.__dict__.setdefault("_begun", []).append((row, max_new_tokens))

    def advance(self) -> list[tuple[int, Call]]:
        """See `Session.advance`: all calls that were begun, to their end."""
        begun = self.__dict__.pop("_begun", [])
        rows = [row for row, _ in begun]
        return list(zip(rows, self.generate(rows, [budget for _, budget in begun]), strict=True)) if rows else []

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`."""
        raise NotImplementedError
