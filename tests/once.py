"""Folders that tests of several files need, and that take long to make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first process of a test run that needs it makes; nobody changes it afterwards."""
    place = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    folder, ended = place / name, place / f"{name}.made"
    with FileLock(place / f"{name}.lock"):
        if not ended.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            ended.touch()
    return folder
