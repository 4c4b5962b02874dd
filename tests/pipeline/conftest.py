"""A toy clone, and one that has already run."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipeline.toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy clone in which nothing has run."""
    return Toy(tmp_path / "clone")


@dataclass(frozen=True)
class First:
    """The first run of the pipeline in a toy clone, with what it executed and left."""

    toy: Toy
    done: "subprocess.CompletedProcess[str]"
    counts: list[str]
    bytes: dict[str, bytes]


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    """Made once; nobody changes it."""
    toy = Toy(tmp_path_factory.mktemp("finished") / "clone")
    done = toy.flow("--no-prefect")
    assert done.returncode == 0, done.stdout + done.stderr
    return First(toy, done, toy.counts(), toy.bytes())


@pytest.fixture
def finished(first: First, tmp_path: Path) -> Toy:
    """A copy of a toy clone whose pipeline has run once; nothing counted yet."""
    copy = object.__new__(Toy)
    copy.root = tmp_path / "finished"
    shutil.copytree(first.toy.root, copy.root, symlinks=True)
    copy.forget()
    return copy
