"""Why a test may be skipped: what a machine may lack. With `STRICT_SKIPS=1` any other skip fails (`conftest.py`).

Packages that `make test` installs, servers that the tests start themselves and the rows of `tests/fixtures` are never
lacking.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks import libraries

HOUSE = Path(__file__).parents[1]
REAL_LIKE = HOUSE / "tests" / "fixtures" / "real"
"""A few rows in the format of real data; what can be checked with them is checked everywhere."""
SHARED = HOUSE.parent / "shared"
"""Real data, tables of papers and Elasticsearch, beside the clone where there are any."""
REAL = SHARED / "data" / "real"

ALLOWED = (
    "no ../shared",
    "no chromium",
    "no Elasticsearch",
    "no GPU",
    "no git repository",
    "no openssl",
    "no TRL",
    "no root",
    "no bfloat16",
    "no build of torch for vLLM",
    "no network",
)
"""How the reason of such a skip begins."""


def needs_shared(path: Path) -> pytest.MarkDecorator:
    """Skip a test where a file or folder of `../shared` is missing."""
    return pytest.mark.skipif(not path.exists(), reason=f"no ../shared: {path.relative_to(SHARED)} is missing")


def chromium() -> str | None:
    """Path of the browser."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


needs_vllm = pytest.mark.skipif(
    bool(libraries.without_build(libraries.VLLM)),
    reason="no build of torch for vLLM: it needs the CPU build, or a GPU. make setup WITH=vllm says where from",
)
"""On such a machine `make test` installs no vLLM either."""

needs_chromium = pytest.mark.skipif(chromium() is None, reason="no chromium: it is not installed")


def fault(reason: str) -> str | None:
    """What is wrong with skipping a test for this reason; None if it may be skipped."""
    if reason.removeprefix("Skipped: ").startswith(ALLOWED):
        return None
    return (
        f"skipped, and STRICT_SKIPS is set: {reason}. This test can run wherever `make test` has installed what it "
        f"needs: make it run, or add what it lacks to tests/skips.py."
    )
