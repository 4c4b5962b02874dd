"""Which commit of this repository a stage ran at, and whether git can say so."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CODE = ("tasks", "flows", "conf", "dvc.yaml", "requirements")  # Settings are recorded themselves.
UNKNOWN = "warning: {}, so this run is recorded without its commit. {}"


class Commit(NamedTuple):
    """The commit that is checked out: `sha` is None outside a repository; is what `CODE` names different from it?"""

    sha: str | None
    is_dirty: bool


def read_commit(root: Path) -> Commit:
    """The commit at which this clone is now; that of a repository around it says nothing."""
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--", *CODE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Commit(None, True)
    if not (root / ".git").exists():
        return Commit(None, True)
    sha, *lines = done.stdout.removeprefix("# branch.oid ").splitlines()
    return Commit(None if sha == "(initial)" else sha, any(not line.startswith("#") for line in lines))


def check_repository(root: Path) -> None:
    """Refuse a tree of this project that is no git repository; warn where git cannot name its commit.

    Raises:
        ValueError: there is no repository, such as in what a ZIP file held; DVC needs one.
    """
    if not (root / "dvc.yaml").is_file() or not (root / ".dvc").is_dir():
        return  # No tree of this project, of which its programs say more.
    if not (root / ".git").exists():
        raise ValueError(
            f"{root.absolute()}: found no git repository, as where a ZIP file was unpacked; DVC needs one. Run "
            "`git init` there and run again, or work in a clone (git clone), whose results name their commit."
        )
    try:
        words = ["git", "-C", str(root), "rev-parse", "--git-dir"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        print(UNKNOWN.format(f"git cannot be started ({error.strerror})", "Install git."), file=sys.stderr, flush=True)
        return
    if done.returncode:
        reason = " ".join(done.stderr.split()).split(" To add")[0].removeprefix("fatal: ")[:300] or "no reason given"
        mend = f"For a folder that you trust: git config --global --add safe.directory {root.absolute()}"
        print(UNKNOWN.format(f"git cannot read this clone ({reason})", mend), file=sys.stderr, flush=True)
