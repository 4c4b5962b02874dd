"""A process that ends with its parent, so that nothing goes on working after the program that started it was killed.

`python -m tasks.lifetime PROGRAM WORDS...` becomes that program, which then ends with the parent.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence


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


def killed_after_us(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Let these processes be killed once this one is gone, however it ends.

    For processes that a library starts, which cannot be asked to end with their parent.

    Returns:
        the process that watches. End it where these processes end in an orderly way.
    """
    watch = 'read -r _; kill -9 "$@" 2>/dev/null'  # Nothing is ever written, so it reads until the other side closes.
    return subprocess.Popen(["sh", "-c", watch, "sh", *map(str, pids)], stdin=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    end_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        raise SystemExit(f"{sys.argv[1]}: {error.strerror}") from None
