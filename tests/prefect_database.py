"""A Prefect database that has its tables, for clones that tests make: Prefect takes 5 CPU-seconds to make them."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

KEPT = Path(__file__).resolve().parents[1] / ".scratch/tests"


def give(home: Path) -> None:
    """Put a copy into `home`, Prefect's folder, if it has none; the first call of all makes what later ones copy."""
    if (home / "prefect.db").exists():
        return
    made = KEPT / f"prefect-{version('prefect')}.db"
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_suffix(".lock")):
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=KEPT) as folder:
                # No setting of the caller's may lead to a database of theirs.
                env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
                env |= {"PREFECT_HOME": folder, "DO_NOT_TRACK": "true"}
                command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
                subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
                Path(folder, "prefect.db").replace(made)
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, home / "prefect.db")
