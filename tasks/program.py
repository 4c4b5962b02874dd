"""How a program of this clone begins and ends, so that a closed pipe is no error and a closed stream harms no file."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import NoReturn

PIPE_CLOSED = 141
"""The exit status of shells for a program whose reader is gone."""


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program and end it with the status that `main` gives, or with `PIPE_CLOSED` if nobody reads its output.

    Raises:
        SystemExit: always.
    """
    open_standard_files()
    code: int | str | None
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            code = PIPE_CLOSED
        elif error.errno == errno.ENOSPC and error.filename is None:
            code = _full()
        else:
            raise
    raise SystemExit(flushed(code))


def _full() -> int:
    """Say that the output has no room; returns the exit status."""
    with contextlib.suppress(OSError):
        print("error: no space left where the output goes. Free some and run again.", file=sys.stderr, flush=True)
    return 1


def open_standard_files() -> None:
    """Open /dev/null for each standard stream that is closed: the next file would get its number, and its text."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def is_unread() -> bool:
    """Whether standard output or standard error is a pipe that nobody reads any more."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def flushed(code: int | str | None) -> int | str | None:
    """Write what is still held back; the exit status, which is `PIPE_CLOSED` where nobody reads it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and error.errno != errno.ENOSPC:
                raise
            code = code or (PIPE_CLOSED if isinstance(error, BrokenPipeError) else _full())
            with contextlib.suppress(OSError, ValueError):  # Python flushes again at its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
