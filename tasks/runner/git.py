"""Which commit of this repository a stage ran at."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_state(root: Path) -> tuple[str | None, bool]:
    """`(commit or None, whether code or settings differ from it)`; `(None, True)` outside a repository."""
    code = ("tasks", "flows", "conf", "dvc.yaml", "params.yaml", "requirements")
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *code)
    return head or None, head is None or changes is None or bool(changes)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
