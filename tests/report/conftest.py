"""One artifact tree and its results, built once for all tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.report.table import Results, build
from tests.report.fake_artifacts import SYSTEMS, TITLES, write_artifacts


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifacts(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def results(artifacts: Path) -> Results:
    return build(artifacts, SYSTEMS, (0, 1), "base", 200, TITLES)
