"""DVC in a process that ends with its parent: `python -m flows.dvc_command repro ...`. It adds no options."""

import ctypes
import os
import signal
import sys


def main() -> int:
    """Ask Linux for SIGTERM when the parent dies, then run `dvc` in this process."""
    if sys.platform == "linux":
        parent = os.getppid()
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # The parent died between the two calls.
            return 143
    from dvc.cli import main as dvc

    return int(dvc(sys.argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
