"""Counting in chunks: the files of bm25s to the byte, and a killed build that counts nothing twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import retrieval, store
from tasks.retrieval import bm25, postings
from tasks.retrieval.bm25 import Analyzer, Settings

WORDS = st.sampled_from(["ash", "birch", "cedar", "date", "elm", "fir", "the", "Zürich", "running", "runs"])
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)


def _by_bm25s(passages: list[tuple[str, str]], config: Settings, out: Path) -> None:
    """The whole corpus in memory through bm25s itself."""
    analyzer = Analyzer(config)
    vocabulary, documents = {"": 0}, []
    for title, text in passages:
        for term in (*analyzer.terms(title), *analyzer.terms(text)):
            vocabulary.setdefault(term, len(vocabulary))
        terms = analyzer.terms(title) * config.title_weight + analyzer.terms(text)
        documents.append([vocabulary[term] for term in terms])
    index = bm25s.BM25(k1=config.k1, b=config.b, method="lucene", backend="numba", auto_compile=False)
    with np.errstate(invalid="ignore"):  # Passages without a single term have mean length 0.
        index.index((documents, vocabulary), show_progress=False)
    index.save(out, show_progress=False)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    passages=st.lists(st.tuples(TEXTS, TEXTS.map(lambda text: text + " .")), min_size=1, max_size=30),
    config=st.builds(
        Settings,
        st.just("bm25"),
        k1=st.sampled_from([0.0, 0.9, 1.5]),
        b=st.sampled_from([0.0, 0.4, 1.0]),
        stemmer=st.sampled_from(["none", "snowball"]),
        title_weight=st.integers(0, 3),
    ),
    limits=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 25)),
)
def test_the_files_are_those_of_bm25s(corpus, passages, config, limits):
    path = corpus(passages)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("CHUNK_PASSAGES", "CHUNK_TOKENS", "RANGE_POSTINGS"), limits, strict=True):
            patch.setattr(postings, name, value)
        retrieval.build(path, path.parent / "index", config)
    _by_bm25s(passages, config, path.parent / "expected")
    expected = {file.name: file.read_bytes() for file in (path.parent / "expected").iterdir()}
    assert {name: (path.parent / "index" / name).read_bytes() for name in expected} == expected


def _build_and_die(path: Path, scratch: Path, after: int) -> None:
    counted = 0
    words = Analyzer.words

    def counting(self: Analyzer, text: str) -> list[str]:
        nonlocal counted
        counted += 1
        if counted > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return words(self, text)

    Analyzer.words = counting  # type: ignore[method-assign]
    postings.CHUNK_PASSAGES = 3
    retrieval.build(path, path.parent / "index", Settings("bm25"), scratch)


def test_a_killed_build_goes_on_after_its_last_chunk(corpus, town_passages, tmp_path, monkeypatch):
    path, scratch = corpus(town_passages), tmp_path / "scratch"
    monkeypatch.setattr(postings, "CHUNK_PASSAGES", 3)
    retrieval.build(path, tmp_path / "whole", Settings("bm25"), tmp_path / "other")
    assert [left.name for left in (tmp_path / "other").iterdir()] == ["lock"]
    process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(path, scratch, 2 * 7))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(scratch.glob("*/chunk-*.bin"))) == 2
    torn = next(scratch.glob("*/chunk-000001.bin"))
    torn.write_bytes(torn.read_bytes()[:-50] + torn.read_bytes()[-49:])
    texts: list[str] = []
    words = Analyzer.words
    monkeypatch.setattr(Analyzer, "words", lambda self, text: texts.append(text) or words(self, text))
    retrieval.build(path, tmp_path / "index", Settings("bm25"), scratch)
    assert texts == [text for passage in town_passages[3:] for text in passage]
    for file in (tmp_path / "whole").iterdir():
        assert store.sha256(tmp_path / "index" / file.name) == store.sha256(file), file.name


def test_builds_that_share_scratch_take_turns(corpus, town_passages, tmp_path, capsys):
    path, scratch, held = corpus(town_passages), tmp_path / "scratch", threading.Event()

    def slow(iterable, total, desc):
        held.wait()
        yield from iterable

    def build(name, progress):
        return threading.Thread(
            target=retrieval.build, args=(path, tmp_path / name, Settings("bm25"), scratch, progress)
        )

    first, second = build("one", slow), build("two", retrieval.silent)
    first.start()
    while not list(scratch.glob("bm25-*")):
        time.sleep(0.01)
    second.start()
    while "waiting for another build that uses" not in capsys.readouterr().out:
        time.sleep(0.01)
    held.set()
    first.join()
    second.join()
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "two" / "manifest.json").read_bytes()
    assert [left.name for left in scratch.iterdir()] == ["lock"]


def test_chunks_of_another_analysis_are_not_used(tmp_path):
    scratch, names = tmp_path / "scratch", []
    for config in (Settings("bm25"), Settings("bm25", title_weight=2), Settings("bm25", stemmer="snowball")):
        with bm25._work_folder(scratch, "corpus", config) as folder:
            names.append(folder.name)
    with bm25._work_folder(scratch, "corpus", Settings("bm25", k1=0.9, b=0.1)) as folder:
        assert folder.name == names[0]  # The same counts serve any k1 and b.
    assert len(set(names)) == 3
