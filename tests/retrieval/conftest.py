"""Small corpora for the retrieval tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tasks import store

Corpus = Callable[[Iterable[tuple[str, str]]], Path]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Writes (title, text) pairs as `corpus.jsonl`; passage i has id `p<i>`."""

    def write(passages: Iterable[tuple[str, str]]) -> Path:
        rows = ({"id": f"p{i}", "title": title, "text": text} for i, (title, text) in enumerate(passages))
        path = tmp_path / "corpus.jsonl"
        store.write_jsonl(path, rows)
        return path

    return write


@pytest.fixture
def town_passages() -> list[tuple[str, str]]:
    """Ten short passages with shared words, a title match, two equal passages and one without a usable term."""
    return [
        ("Zürich", "Zürich is the largest city of Switzerland."),
        ("Bern", "Bern is the capital city of Switzerland, not Zürich."),
        ("River Aare", "The Aare runs through Bern. The river is long; the river is cold."),
        ("Twin one", "Equal words stand here about mountains"),
        ("Twin one", "Equal words stand here about mountains"),
        ("", "A title can be missing and the city still be found."),
        ("東京", "東京 は日本の首都 である"),
        ("Mountains", "Running water, runners and a run."),
        ("Stop", "It is as it was, and that is that."),
        ("Long", "city " * 40 + "river"),
    ]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Key and certificate for 127.0.0.1, signed by nobody else."""
    key, pem = tmp_path / "key.pem", tmp_path / "ca.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    if not shutil.which("openssl"):
        pytest.skip("no openssl: it is not installed")
    subprocess.run([*words.split(), "-keyout", str(key), "-out", str(pem)], capture_output=True, check=True)
    return key, pem
