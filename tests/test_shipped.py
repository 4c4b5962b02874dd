"""Tests speak of what git has: neither files that a user adds to a clone nor what a run writes there turn one red."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shipped

CACHED = (shipped._tracked, shipped.changed, shipped.root)


def _git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with one method, reward and report, and its user's own beside each; settings were changed, too."""
    before = {"params.yaml": "seeds: [0]\n", "dvc.lock": "a\n", "reports/x.json": "1\n"}
    theirs = {"conf/method/a.yaml": "a: 1\n", "tasks/rewards/a.py": "PART = 1\n"}
    own = {"conf/method/mine.yaml": "a: 2\n", "tasks/rewards/mine.py": "PART = 2\n", "notebooks/mine.ipynb": "{}"}
    for name, text in (before | theirs).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "all")
    (tmp_path / "notebooks").mkdir()
    for name in (own | dict.fromkeys(before, "seeds: [7]\n")).items():
        (tmp_path / name[0]).write_text(name[1])

    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    for function in CACHED:
        function.cache_clear()
    yield tmp_path
    for function in CACHED:
        function.cache_clear()


def test_what_a_user_has_added_or_changed_is_not_shipped(clone: Path) -> None:
    assert shipped.names("method") == ["a"]
    assert [path.name for path in shipped.files("tasks", "*.py")] == ["a.py"]
    assert shipped.files("notebooks") == []
    assert shipped.is_shipped(clone / "conf/method")
    assert not shipped.is_shipped(clone / "notebooks")
    assert shipped.changed() == {"params.yaml", "dvc.lock", "reports/x.json"}
    assert (shipped.root() / "params.yaml").read_text() == "seeds: [0]\n"
    assert (shipped.root() / "conf/method/mine.yaml").is_file()


def test_a_copy_without_git_is_taken_as_it_is(clone: Path) -> None:
    (clone / ".git").rename(clone / "git")
    assert shipped.names("method") == ["a", "mine"]
    assert (shipped.changed(), shipped.root()) == (frozenset(), clone)


def test_tests_that_list_the_files_of_the_repository_ask_git() -> None:
    """Files of tests, and whether a path that a document names exists, are asked of the disk."""
    listing = re.compile(
        r"(?:ROOT|HOUSE|PAGES|parents\[\d\])\b[^\n]*\.(?:r?glob|iterdir)\(|parts\.kinds\(\"|parts\.kinds\('"
    )
    found = {
        path.relative_to(shipped.ROOT).as_posix()
        for path in shipped.files("tests", "*.py")
        if any(listing.search(line) and "shipped." not in line for line in path.read_text(encoding="utf-8").split("\n"))
    }
    assert found == {
        "tests/docs/test_documents.py",
        "tests/methods/test_papers.py",
        "tests/shipped.py",
    }
