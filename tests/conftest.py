"""Fixtures of several rooms: tokenizers and tiny random models, made once. Which skips are failures."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import skips

# A busy machine is no failure: how long examples take is never asserted.
hypothesis.settings.register_profile("house", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("house")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["BREADCRUMB_PARTS"] = "conf/parts/none.txt"  # Not those of whoever runs the tests.
gc.set_threshold(50_000)  # Thousands of tests and their libraries stay in memory; looking through them takes long.


def _strict(report: Any) -> Any:
    """The report, as a failure if it is a skip that must not be; of an expected failure `wasxfail` tells."""
    if os.environ.get("STRICT_SKIPS") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        fault = skips.fault(report.longrepr[2])
        if fault is not None:
            report.outcome, report.longrepr = "failed", fault
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that skips itself or is skipped by a mark."""
    return _strict((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """A file that skips itself, such as for a package that is not there."""
    return _strict((yield))


def pytest_collection(session: pytest.Session) -> None:
    """Let each of several processes compile another part of the tests first; Python keeps what was compiled for all."""
    count, worker = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    files = sorted(Path(__file__).parent.rglob("test_*.py")) if count > 1 else []
    first = int(worker.removeprefix("gw")) * len(files) // count
    for path in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # The collection tells what is wrong with a file.
            importlib.import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no process is left alone with one of them at the end."""

    def rank(item: pytest.Item) -> tuple[float, bool]:
        limit = item.get_closest_marker("timeout")
        return -(limit.args[0] if limit else 0), item.get_closest_marker("slow") is None

    by_file: dict[Any, tuple[float, bool]] = {}
    for item in items:
        by_file[item.path] = min(rank(item), by_file.get(item.path, (0, True)))
    items.sort(key=lambda item: by_file[item.path])


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Tags are single tokens; see `tests.tiny`."""
    from tests.tiny import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def merging() -> Any:
    """A byte-level BPE in which ">" merges with what follows; see `tests.tiny`."""
    from tests.tiny import make_merging_tokenizer

    return make_merging_tokenizer()


@pytest.fixture
def model(tokenizer: Any) -> Any:
    """A tiny random Qwen2 in evaluation mode."""
    import torch

    from tests.tiny import make_model

    torch.set_num_threads(1)
    return make_model(tokenizer)


@pytest.fixture(scope="session")
def forking() -> Iterator[Path]:
    """A folder with a `python` that forks; see `tests.forked`."""
    from tests.forked import forking_python

    with forking_python() as folder:
        yield folder


@pytest.fixture
def forked_workers(forking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this host are forked from a process that has the libraries."""
    from tasks import cluster
    from tests.forked import cluster_of

    monkeypatch.setattr(cluster, "load", lambda: cluster_of(forking))
