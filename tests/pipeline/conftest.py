"""A toy clone, and one that has already run."""

import shutil
from pathlib import Path

import pytest

from tests.pipeline.toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy clone in which nothing has run."""
    return Toy(tmp_path / "clone")


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("finished") / "clone")
    done = toy.flow("--no-prefect")
    assert done.returncode == 0, done.stdout + done.stderr
    return toy


@pytest.fixture
def finished(_finished: Toy, tmp_path: Path) -> Toy:
    """A copy of a toy clone whose pipeline has run once; nothing counted yet."""
    copy = object.__new__(Toy)
    copy.root = tmp_path / "finished"
    shutil.copytree(_finished.root, copy.root, symlinks=True)
    copy.forget()
    return copy
