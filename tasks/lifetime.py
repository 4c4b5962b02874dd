"""A process that ends with its parent, so that nothing goes on working after the program that started it was killed.

`python -m tasks.lifetime PROGRAM WORDS...` becomes that program, which then ends with the parent.
"""

import ctypes
import os
import signal
import sys


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies; elsewhere a process outlives its parent.

    Raises:
        SystemExit: 143, the parent died between the two calls.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(143)


if __name__ == "__main__":
    end_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        raise SystemExit(f"{sys.argv[1]}: {error.strerror}") from None
