"""Which commit of this repository a stage ran at."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Commit:
    """The commit that is checked out.

    Attributes:
        sha: None outside a repository.
        is_dirty: whether code or settings differ from it.
    """

    sha: str | None
    is_dirty: bool


def read_commit(root: Path) -> Commit:
    """The commit at which this clone is now."""
    code = ("tasks", "flows", "conf", "dvc.yaml", "params.yaml", "requirements")
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *code)
    return Commit(head or None, head is None or changes is None or bool(changes))


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
