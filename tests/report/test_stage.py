"""The stage's body writes three files that go together and names systems by their titles."""

from __future__ import annotations

from pathlib import Path

from tasks import conf
from tasks.report import printed, table
from tasks.stages import report
from tests.report.fake_artifacts import METHODS, SYSTEMS, TITLES, write_artifacts


def test_stage_writes_the_three_files(tmp_path: Path):
    write_artifacts(tmp_path, num_questions=6, steps=4)
    for name in METHODS:
        path = tmp_path / "conf" / "method" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"title: {TITLES[name]}\n" if name.endswith("grpo") else "clip_low: 0.2\n")
    (tmp_path / "conf" / "system").mkdir()
    (tmp_path / "conf" / "system" / "base.yaml").write_text("kind: policy\ntitle: base\n")
    papers = tmp_path / "conf" / printed.FILE
    papers.parent.mkdir()
    papers.write_text(",".join(printed.COLUMNS) + "\nsearch_r1_ppo,PiCA,1,3B,E5,NQ,em,0.341\n")
    evaluate = conf.Evaluate(top_k=3, max_questions=0, num_bootstrap=100, sampled=True, reference="base")
    params = conf.Params("laptop", "world", "", "tiny", "bm25", "plain", SYSTEMS, (0, 1), evaluate)
    shown = table.terminal(report.write(params, tmp_path), {})
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["base", "search_r1_ppo", "Search-R1-GRPO"]
    reports = tmp_path / "reports"
    assert {path.name for path in reports.iterdir()} == {"index.html", "results.csv", "results.md"}
    text = (reports / "results.md").read_text()
    assert "Search-R1-GRPO" in text
    assert "paper, other scale: PiCA, Table 1" in text
    assert "## Health in numbers" in text
    assert "search_r1_grpo,all,all,all,greedy,em," in (reports / "results.csv").read_text()
    assert "Search-R1-GRPO" in (reports / "index.html").read_text()
