"""A test that could run and was skipped is a failure where `STRICT_SKIPS` is set, as CI does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shipped

ROOT = Path(__file__).parents[2]
TESTS = {
    "test_marked.py": """
import pytest
@pytest.mark.skipif(True, reason="REASON")
def test_marked(): pass
@pytest.fixture
def lacking(): pytest.skip("REASON")
def test_fixture(lacking): pass
def test_body(): pytest.skip("REASON")
@pytest.mark.xfail
def test_expected_to_fail(): raise ValueError
""",
    "test_file.py": 'import pytest\npytest.importorskip("a_package_that_is_not_there")\ndef test_any(): pass\n',
    "test_lacking_file.py": 'import pytest\npytest.skip("REASON", allow_module_level=True)\n',
}


def _run(folder: Path, reason: str, **more: str) -> str:
    for name, text in TESTS.items():
        (folder / name).write_text(text.replace("REASON", reason))
    (folder / "conftest.py").write_text(
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "STRICT_SKIPS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder),
         "--continue-on-collection-errors"],
        cwd=folder, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)} | more,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_without_the_variable_a_skip_is_a_skip(tmp_path: Path) -> None:
    assert "5 skipped, 1 xfailed" in _run(tmp_path, "it rains")


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("it rains", r"1 failed, 1 xfailed, 4 errors"),
        ("no ../shared: x is missing", r"4 skipped, 1 xfailed, 1 error\b"),
    ],
)
def test_with_it_only_what_a_machine_may_lack_is_a_reason(tmp_path: Path, reason: str, outcome: str) -> None:
    printed = _run(tmp_path, reason, STRICT_SKIPS="1")
    assert re.search(outcome, printed), printed
    assert "a_package_that_is_not_there" in printed
    assert ("skipped, and STRICT_SKIPS is set: Skipped: it rains" in printed) == (reason == "it rains")


def test_ci_sets_it() -> None:
    assert "STRICT_SKIPS=1 make" in (ROOT / ".ci/run").read_text()


def test_every_reason_in_a_test_file_is_one_of_the_list() -> None:
    """A new `skip` with a reason of its own fails in CI only on a machine that lacks something: say so here."""
    found = [
        f"{path.relative_to(ROOT)}: {call[0]}"
        for path in shipped.files("tests", "*.py")
        if path.name not in ("test_skips.py", "skips.py")
        for call in re.finditer(r"(?:pytest\.skip\(|skipif\(.*reason=)f?[\"']([^\"']*)", path.read_text())
        if not call[1].startswith("no ")
    ]
    assert found == []
