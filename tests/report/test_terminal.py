"""The head of `results.md` as a terminal shows it, and what else a run says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.dag import Dag
from flows.pipeline import REPORT, Run
from tasks.report.table import build, markdown
from tasks.report.terminal import TABLE, fitted, headline, times
from tests.report.fake_artifacts import SYSTEMS, TITLES, write_artifacts


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real `results.md`."""
    root = tmp_path_factory.mktemp("run")
    artifacts = write_artifacts(root, num_questions=6, steps=3)
    text = markdown(build(artifacts, SYSTEMS, (0, 1), "base", 50, {**TITLES, "search_r1_ppo": "a | <b>"}))
    (root / TABLE).parent.mkdir(exist_ok=True)
    (root / TABLE).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_is_aligned_and_fits_the_terminal(clone: Path, width: int) -> None:
    lines = headline(clone, width).splitlines()
    assert fitted((clone / TABLE).read_text(encoding="utf-8"), width).splitlines() == lines
    assert max(map(len, lines)) <= width
    assert lines[0] == "Results"
    assert not any("|" in line.replace("a | <b>", "") or "---" in line for line in lines)
    table = [line for line in lines if line.startswith(("policy", "base", "a | <b>", "Search-R1-GRPO"))]
    ends = table[0].index("EM - base") + len("EM - base")
    assert {line[ends - 1] for line in table[2:4]} == {"]"}  # A column ends at one place.
    assert ("EM, seed 0" in table[0]) == (width == 140)
    assert sum(" ".join(line.split()).count("gold recall") for line in table) == 1  # What does not fit stands below.
    assert not any("dataset" in line for line in table)


def test_results_by_dataset_come_with_the_run(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, num_questions=6, steps=3, datasets=("nq", "musique"))
    text = markdown(build(artifacts, SYSTEMS, (0, 1), "base", 50, TITLES))
    (tmp_path / TABLE).parent.mkdir(exist_ok=True)
    (tmp_path / TABLE).write_text(text, encoding="utf-8")
    lines = headline(tmp_path, 100).splitlines()
    assert max(map(len, lines)) <= 100
    header = next(line for line in lines if line.startswith("dataset"))
    assert all(name in header for name in ("policy", "EM", "F1", "searches", "gold recall"))
    rows = [line.split()[:2] for line in lines if line.startswith(("musique", "nq"))]
    assert rows[:2] == [["musique", "base"], ["musique", "Search-R1-PPO"]]


def test_what_stages_took_is_said_by_kind_and_system() -> None:
    taken = {"plan": 2.0, "base@0": 600.0, "train@search_r1_grpo-0": 2400.4, "train@search_r1_grpo-1": 2600.0}
    taken |= {"train@base-0": 1.0, "evaluate@base-0": 300.0, "evaluate@search_r1_grpo-0": 310.0}
    assert times(taken, 60).splitlines() == [
        "Seconds on this machine, means over seeds (all stages: 6,213)",
        "  base: 600",
        "  train: search_r1_grpo 2,500",
        "  evaluate: base 300, search_r1_grpo 310",
    ]
    assert max(map(len, times(taken, 30).splitlines()[1:])) <= 30
    assert times({}) == ""


def test_a_run_ends_with_the_way_to_all_tables_and_to_the_page(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(clone, "key", "title", Dag({}, frozenset()))
    assert run.close() == 0
    said = capsys.readouterr().out
    assert "Training cost" not in said
    assert f"Tables:  {TABLE}" in said
    assert "--force report makes it here" in said
    (clone / REPORT).write_text("a page")
    run.close()
    assert f"Report:  {REPORT} (open it in a browser" in capsys.readouterr().out
    (clone / REPORT).unlink()
    (clone / TABLE).unlink()
    run.close()
    assert "Tables:" not in capsys.readouterr().out
