"""Results go from one clone to another through a DVC remote, as docs/commands.md says."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.pipeline.toy import Toy

pytestmark = pytest.mark.slow


def _dvc(root: Path, words: str) -> None:
    """A command of DVC in this process, which has the library already."""
    from dvc.cli import main

    with contextlib.chdir(root):
        assert main(words.split()) == 0, words


def test_what_one_clone_pushed_another_one_pulls_and_has_nothing_to_run(
    finished: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = finished.bytes()
    for words in ("repro report", f"remote add --default store {tmp_path / 'place'}", "push", "gc --force --workspace"):
        _dvc(finished.root, words)
    other = object.__new__(Toy)
    other.root = tmp_path / "other"
    not_shared = shutil.ignore_patterns("artifacts", "reports", "cache", "tmp", ".scratch")
    shutil.copytree(finished.root, other.root, ignore=not_shared)
    assert other.bytes() == {}
    _dvc(other.root, "pull")
    assert other.bytes() == results
    capsys.readouterr()
    _dvc(other.root, "status")
    _dvc(other.root, "dag --dot")
    printed = capsys.readouterr().out
    assert "up to date" in printed
    assert '"train@a-0" -> "evaluate@a-0"' in printed
