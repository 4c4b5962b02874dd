"""An index of the smallest world, and its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks import retrieval, store
from tasks.retrieval import Retriever
from tests.server.running import ROOT, ServerProcess, write_world


@pytest.fixture(scope="session")
def world_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """276 passages."""
    path = tmp_path_factory.mktemp("world") / "corpus.jsonl"
    write_world(path)
    return path


@pytest.fixture(scope="session")
def world_index(world_corpus: Path) -> Path:
    """The BM25 index of them."""
    out = world_corpus.parent / "index"
    retrieval.build(world_corpus, out, retrieval.load_settings("bm25", ROOT))
    return out


@pytest.fixture(scope="session")
def local(world_index: Path) -> Retriever:
    """The same index, opened here."""
    return retrieval.open_retriever(world_index)


@pytest.fixture(scope="module")
def server(world_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A running server with small limits on time."""
    folder = tmp_path_factory.mktemp("server")
    limits = ("read_timeout_s=1.5", "request_timeout_s=20", "stop_timeout_s=5")
    words = [word for limit in limits for word in ("--set", limit)]
    words += ["--set", f"cache_folder={folder}/cache"]
    with ServerProcess(world_index, "--port", "0", *words, cwd=folder) as running:
        yield running


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[[list[tuple[str, str]]], Path]:
    """Builds a BM25 index of (title, text) pairs."""

    def build(passages: list[tuple[str, str]]) -> Path:
        rows = ({"id": f"p{i}", "title": title, "text": text} for i, (title, text) in enumerate(passages))
        store.write_jsonl(tmp_path / "corpus.jsonl", rows)
        retrieval.build(tmp_path / "corpus.jsonl", tmp_path / "index", retrieval.load_settings("bm25", ROOT))
        return tmp_path / "index"

    return build
