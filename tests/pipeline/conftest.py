"""A toy clone, and one that has already run."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.once import made_once
from tests.pipeline.toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy clone in which nothing has run."""
    return Toy(tmp_path / "clone")


@dataclass(frozen=True)
class First:
    """The first run of the pipeline in a toy clone, with what it printed, executed and left."""

    toy: Toy
    printed: str
    counts: list[str]
    bytes: dict[str, bytes]


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    """Nobody changes it."""

    def make(folder: Path) -> None:
        done = Toy(folder / "clone").flow("--no-prefect")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")

    folder = made_once(tmp_path_factory, "finished", make)
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    toy = _toy(folder / "clone")
    return First(toy, printed, toy.counts(), toy.bytes())


def _toy(root: Path) -> Toy:
    """The toy clone that is there."""
    toy = object.__new__(Toy)
    toy.root = root
    return toy


@pytest.fixture
def finished(first: First, tmp_path: Path) -> Toy:
    """A copy of a toy clone whose pipeline has run once; nothing counted yet."""
    copy = _toy(tmp_path / "finished")
    shutil.copytree(first.toy.root, copy.root, symlinks=True)
    copy.forget()
    return copy
