"""Which commit of this repository a stage ran at."""

import subprocess
from pathlib import Path
from typing import NamedTuple

CODE = ("tasks", "flows", "conf", "dvc.yaml", "requirements")  # Settings are recorded themselves.


class Commit(NamedTuple):
    """The commit that is checked out: `sha` is None outside a repository; is what `CODE` names different from it?"""

    sha: str | None
    is_dirty: bool


def read_commit(root: Path) -> Commit:
    """The commit at which this clone is now."""
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--", *CODE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Commit(None, True)
    sha, *lines = done.stdout.removeprefix("# branch.oid ").splitlines()
    return Commit(None if sha == "(initial)" else sha, any(not line.startswith("#") for line in lines))
