"""The stage's body writes three files that go together and names systems by their titles."""

from __future__ import annotations

from pathlib import Path

from tasks.report import printed, table
from tasks.stages import report
from tests.report.fake_artifacts import SYSTEMS, TITLES, write_artifacts


def test_stage_writes_the_three_files(tmp_path: Path):
    write_artifacts(tmp_path, num_questions=6, steps=4)
    papers = tmp_path / report.PAPERS
    papers.parent.mkdir(parents=True)
    papers.write_text(",".join(printed.COLUMNS) + "\nsearch_r1_ppo,PiCA,1,3B,E5,NQ,em,0.341\n")
    titles = {name: TITLES[name] if name.endswith("grpo") else name for name in SYSTEMS}
    settings = report.Settings(titles, (0, 1), "base", 100, {"data": "world", "scale": "laptop"})
    shown = table.terminal(report.write(settings, tmp_path), {})
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["base", "search_r1_ppo", "Search-R1-GRPO"]
    reports = tmp_path / "reports"
    assert {path.name for path in reports.iterdir()} == {"index.html", "results.csv", "results.md"}
    text = (reports / "results.md").read_text()
    assert "Search-R1-GRPO" in text
    assert "paper, other scale: PiCA, Table 1" in text
    assert "## Health in numbers" in text
    assert "search_r1_grpo,all,all,all,greedy,em," in (reports / "results.csv").read_text()
    assert "Search-R1-GRPO" in (reports / "index.html").read_text()
