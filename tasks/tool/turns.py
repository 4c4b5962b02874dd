"""One question is played at a time, in a thread of its own; the others wait for their turn, as many as may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class BusyError(Exception):
    """Too many questions wait; one that comes later may find room."""


class Turns:
    """The turns of one policy; used from one event loop.

    Attributes:
        in_work: questions that are played or wait for their turn.
    """

    def __init__(self, max_in_work: int) -> None:
        """Prepare the thread; `max_in_work` bounds the questions that are played or wait."""
        self.in_work = 0
        self._max = max_in_work
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="play")

    def close(self) -> None:
        """Play nothing more."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def require_room(self) -> None:
        """Raise the BusyError where no further question may wait."""
        if self.in_work >= self._max:
            raise BusyError(f"{self.in_work} questions are played or wait, at most {self._max} may. Ask again later.")

    @contextlib.contextmanager
    def begun(self, play: Callable[[Callable[[], bool]], T]) -> Iterator[Future[T]]:
        """A play, which begins when it is its turn. The end of the block ends it.

        Args:
            play: is called in the thread, with what says whether anybody still wants to know how it ends.

        Raises:
            BusyError: too many wait already.
        """
        self.require_room()
        loop, is_wanted = asyncio.get_running_loop(), True
        self.in_work += 1
        playing = self._thread.submit(play, lambda: is_wanted)
        playing.add_done_callback(lambda _: self._done(loop))
        try:
            yield playing
        finally:
            is_wanted = False
            playing.cancel()

    def _done(self, loop: asyncio.AbstractEventLoop) -> None:
        """A play is over or was never begun; only now has it left the queue."""

        def leave() -> None:
            self.in_work -= 1

        with contextlib.suppress(RuntimeError):  # The event loop has ended in the meantime.
            loop.call_soon_threadsafe(leave)
