"""Fixtures of several rooms: tokenizers and tiny random models, made once."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

# A busy machine is no failure: how long examples take is never asserted.
hypothesis.settings.register_profile("house", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("house")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
