"""Trees of this project that are no whole repository: what stands in the way is said with its cure."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tasks.runner.git import check_repository, read_commit

AS = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *AS, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a ZIP file of this project holds, as far as git and DVC look at it."""
    folder = tmp_path / "tree"
    for name in (".dvc/config", "tasks/x.py", "dvc.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("", encoding="utf-8")
    return folder


@pytest.fixture
def clone(tree: Path) -> Path:
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "first")
    git(tree, "commit", "-qm", "second", "--allow-empty")
    return tree


@pytest.mark.parametrize("is_within_another", [False, True])
def test_an_unpacked_archive_says_what_to_do(tree: Path, is_within_another: bool) -> None:
    if is_within_another:
        git(tree.parent, "init", "-q")
        git(tree.parent, "commit", "-qm", "other", "--allow-empty")
    with pytest.raises(ValueError, match=rf"^{tree}: found no git repository, as where a ZIP .* `git init`"):
        check_repository(tree)
    assert read_commit(tree) == (None, True)

    git(tree, "init", "-q")
    check_repository(tree)
    assert read_commit(tree) == (None, True)


@pytest.mark.parametrize("kind", ["detached", "shallow", "worktree"])
def test_other_clones_are_whole(kind: str, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, head = tmp_path / "other", git(clone, "rev-parse", "HEAD")
    if kind == "detached":
        git(clone, "checkout", "-q", "--detach")
        other = clone
    elif kind == "shallow":
        git(tmp_path, "clone", "-q", "--depth", "1", clone.as_uri(), "other")
    else:
        git(clone, "worktree", "add", "-q", "--detach", str(other))
    check_repository(other)
    assert read_commit(other) == (head, False)
    assert capsys.readouterr().err == ""


def test_without_git_the_run_says_that_it_has_no_commit(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(clone))
    check_repository(clone)
    assert read_commit(clone) == (None, True)
    said = capsys.readouterr().err
    assert re.search(r"^warning: git cannot be started \(.*\), so this run is recorded without its commit", said)


def test_a_clone_that_git_does_not_trust_names_the_command_that_mends_it(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("HOME", str(clone.parent))
    check_repository(clone)
    said = capsys.readouterr().err
    assert "dubious ownership" in said
    assert said.count("\n") == 1
    assert f"git config --global --add safe.directory {clone}" in said
