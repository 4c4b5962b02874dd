"""Folders for the tests of this room: small ones made here, and the real one beside the clone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.data.ingest import FolderConf, ingest
from tests.data.rows import Row, lines, passage, question
from tests.skips import REAL, REAL_LIKE


@pytest.fixture(scope="session", params=[REAL_LIKE, REAL], ids=["written", "shared"])
def real_folder(request: pytest.FixtureRequest) -> Path:
    """A folder in the format of real data: the few rows of the tests, and the one beside the clone."""
    folder: Path = request.param
    if not folder.is_dir():
        pytest.skip("no ../shared: data/real is missing")
    return folder


@pytest.fixture(scope="session")
def real_data(real_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real data as the data stage writes it."""
    out = tmp_path_factory.mktemp("real") / "data"
    ingest(real_folder, out, FolderConf(unscorable="drop"))
    return out


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder of data; rows or raw text for either file."""

    def make(questions: list[Row] | str | None = None, corpus: list[Row] | str | None = None) -> Path:
        folder = tmp_path / "given"
        folder.mkdir(exist_ok=True)
        questions = [question(n) for n in range(4)] if questions is None else questions
        corpus = [passage(n) for n in range(3)] if corpus is None else corpus
        for name, rows in (("questions.jsonl", questions), ("corpus.jsonl", corpus)):
            (folder / name).write_text(rows if isinstance(rows, str) else lines(rows), encoding="utf-8")
        return folder

    return make
