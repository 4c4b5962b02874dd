"""What a run says at its end: the headline of `results.md`, for a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.farewell import REPORT, TABLE, headline, summary
from flows.pipeline import Run
from tasks.report.table import build, markdown
from tests.report.fake_artifacts import SYSTEMS, TITLES, write_artifacts


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real `results.md`."""
    artifacts = write_artifacts(tmp_path_factory.mktemp("run"), num_questions=6, steps=3)
    return markdown(build(artifacts, SYSTEMS, (0, 1), "base", 50, {**TITLES, "search_r1_ppo": "a | <b>"}))


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_is_aligned_and_fits_the_terminal(text: str, width: int):
    lines = headline(text, width)
    assert max(map(len, lines)) <= width
    assert lines[0] == "Results"
    assert not any("|" in line.replace("a | <b>", "") or "---" in line for line in lines)
    table = [line for line in lines if line.startswith(("policy", "base", "a | <b>", "Search-R1-GRPO"))]
    assert len(table) == 4
    ends = table[0].index("EM") + 2
    assert {line[ends - 1] for line in table[1:]} <= {"]"}  # A column ends at one place.
    assert ("F1" in table[0]) == (width == 140)


def run_in(root: Path) -> Run:
    return Run(root, "key", "title", None, (), 1, [])  # type: ignore[arg-type]


def test_it_ends_with_the_way_to_all_tables_and_to_the_page(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Run, "verdict", "3 of 3 stages executed")
    (tmp_path / TABLE).parent.mkdir()
    (tmp_path / TABLE).write_text(text)
    said = summary(run_in(tmp_path))
    assert "Training cost" not in said
    assert f"Tables:  {TABLE}" in said
    assert "--force report makes it here" in said
    (tmp_path / REPORT).write_text("a page")
    assert f"Report:  {REPORT} (open it in a browser" in summary(run_in(tmp_path))
