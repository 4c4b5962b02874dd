"""A training run that kills itself: `python -m tests.train.killed <scratch> <algorithm> <moment> <number>`.

Moments: `report` (after that many reports, before the checkpoint) and `save` (inside that checkpoint's writing).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tasks import checkpoint
from tests.tiny import make_trainer


def main(scratch: str, algorithm: str, moment: str, number: str) -> None:
    """Run until the moment comes."""
    left = {moment: int(number)}

    def count(name: str) -> None:
        left[name] = left.get(name, 0) - 1
        if left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    digest = checkpoint.sha256

    def hashing(path: Path) -> Any:
        if path.parts[-2:] == ("run", "values.json"):
            count("save")
        return digest(path)

    checkpoint.sha256 = hashing
    make_trainer(Path(scratch), algorithm, num_steps=5, minibatches=2, log=lambda step, metrics: count("report")).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
