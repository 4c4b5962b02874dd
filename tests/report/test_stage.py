"""The stage's body writes files that go together and names systems by their titles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tasks.plan import RunSettings
from tasks.report import printed, table
from tasks.runner import record
from tasks.stages import report
from tasks.store import read_json, write_json
from tests import shipped
from tests.pipeline.toy import HOUSE
from tests.report.fake_artifacts import SYSTEMS, TITLES, ledger, write_artifacts


@pytest.fixture
def settings(tmp_path: Path) -> report.Settings:
    """Settings of a report whose artifacts exist."""
    write_artifacts(tmp_path, num_questions=6, steps=4)
    papers = tmp_path / report.PAPERS
    papers.parent.mkdir(parents=True)
    papers.write_text(",".join(printed.COLUMNS) + "\nsearch_r1_ppo,PiCA,1,3B,E5,NQ,em,0.341\n")
    titles = {name: TITLES[name] if name.endswith("grpo") else name for name in SYSTEMS}
    return report.Settings(titles, (0, 1), "base", 100, {"data": "world", "scale": "laptop"}, "dev")


def outputs() -> list[str]:
    """What `dvc.yaml` versions of the report."""
    stage = yaml.safe_load((Path(__file__).parents[2] / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["report"]
    return [next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"]]


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder."""
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


def test_no_versioned_file_holds_what_was_measured_on_a_machine(
    tmp_path: Path, settings: report.Settings, monkeypatch: pytest.MonkeyPatch
):
    assert outputs() == [f"reports/{name}" for name in report.FILES if name != "index.html"]
    versioned, pages = set(), set()
    for seconds in (10.0, 999.0):
        measured = ledger((0, 1), seconds)
        monkeypatch.setattr(report.ledger, "read", lambda root, measured=measured: measured)
        report.write(settings, tmp_path)
        paths = sorted(path for name in outputs() for path in _files(tmp_path / name))
        versioned.add(tuple((path.name, path.read_bytes()) for path in paths))
        pages.add((tmp_path / "reports/index.html").read_bytes())
    assert (len(versioned), len(pages)) == (1, 2)


@pytest.mark.parametrize("breaks", ["table.build", "table.write_markdown", "page.write_page"])
def test_a_report_that_breaks_off_leaves_no_file_of_an_earlier_one(
    tmp_path: Path, settings: report.Settings, monkeypatch: pytest.MonkeyPatch, breaks: str
):
    report.write(settings, tmp_path)
    for path in _files(tmp_path / "reports"):
        path.write_text("of an earlier run")

    def fail(*words: object, **named: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(f"tasks.report.{breaks}", fail)
    with pytest.raises(OSError, match="no space left"):
        report.write(settings, tmp_path)
    assert not [path for path in _files(tmp_path / "reports") if path.read_text() == "of an earlier run"]


def test_questions_of_the_validation_split_are_not_called_held_out(tmp_path: Path, settings: report.Settings):
    for path in (tmp_path / "artifacts").glob("train/*/summary.json"):
        write_json(path, read_json(path) | {"settings": {"train": {"select": "best"}}})
    assert "6 held-out questions" in table.markdown(report.results(settings, tmp_path))
    assert "held-out" not in table.markdown(report.results(replace(settings, validation_split="test"), tmp_path))


def test_stage_writes_the_files(tmp_path: Path, settings: report.Settings):
    report.write(settings, tmp_path)
    reports = tmp_path / "reports"
    assert {path.name for path in reports.iterdir()} == set(report.FILES)
    text = (reports / "results.md").read_text()
    assert "Search-R1-GRPO" in text
    assert "paper, other scale: PiCA, Table 1" in text
    assert "## Health in numbers" in text
    assert "search_r1_grpo,all,all,all,greedy,em," in (reports / "results.csv").read_text()
    assert "Search-R1-GRPO" in (reports / "index.html").read_text()


def test_the_stage_prints_the_table_where_no_run_does_and_as_wide_as_the_terminal(
    tmp_path: Path, settings: report.Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(report, "guard", lambda settings, root: None)  # What was played is made up.
    monkeypatch.setenv("COLUMNS", "80")
    ctx: Any = SimpleNamespace(settings=settings, root=tmp_path, track=record.Track("report", tmp_path))
    monkeypatch.setenv("BREADCRUMB_RUN", "key")
    report.body(ctx)
    assert capsys.readouterr().out == ""

    monkeypatch.delenv("BREADCRUMB_RUN")
    report.body(ctx)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Results"
    assert len([line for line in lines if line.startswith("Search-R1-GRPO  ")]) > 1, "the rest stands below"
    assert max(map(len, lines)) <= 80


def test_notes_stand_before_the_table(tmp_path: Path, settings: report.Settings):
    report.write(replace(settings, notes=("Nothing is learned here.",)), tmp_path)
    text = (tmp_path / "reports/results.md").read_text(encoding="utf-8")
    assert text.index("Nothing is learned here.") < text.index("| policy |")
    assert "Nothing is learned here." in (tmp_path / "reports/index.html").read_text(encoding="utf-8")


def test_the_manifest_says_whose_split_it_is_everywhere_before_the_table(tmp_path: Path, settings: report.Settings):
    path = tmp_path / "artifacts/data/manifest.json"
    near = {"train_rows_near_evaluation": 1200}
    write_json(path, {**read_json(path), "resplit": {"shares": {"train": 0.7, "test": 0.3}}, "near_duplicates": near})
    found = report.write(replace(settings, notes=("Smoke.",)), tmp_path)
    notes = [
        "Smoke.",
        "Our own split of published rows; not comparable with papers.",
        "Train questions that are near-duplicates of evaluation questions: 1,200.",
    ]
    assert list(found.notes) == notes
    page = (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    for text in ((tmp_path / "reports/results.md").read_text(encoding="utf-8"), page):
        assert all(note in text for note in notes)
        assert "Beside the papers" not in text


def test_a_run_at_smoke_scale_or_with_other_passages_than_in_training_is_told_apart():
    def notes(scale: str, top_k: int) -> tuple[str, ...]:
        chosen = shipped.settings()
        chosen = replace(chosen, scale=scale, evaluate=replace(chosen.evaluate, top_k=top_k))
        return report.settings(RunSettings(HOUSE, chosen)).notes

    assert notes("laptop", 0) == notes("laptop", 1) == ()
    assert notes("smoke", 0) == ("Smoke scale: nothing is learned here; it only shows that the pipeline runs.",)
    (text,) = notes("laptop", 3)
    assert text.startswith("Evaluated with 3 passages per search; the scale trains with 1")


def test_the_best_system_has_a_name_that_all_runs_share(tmp_path: Path, settings: report.Settings):
    """By it MLflow compares runs of different systems."""
    numbers = report._compared_by(report.results(settings, tmp_path))
    ems = {name: number for name, number in numbers.items() if name.endswith("/em") and not name.startswith("best")}
    assert numbers["best/em"] == max(number for name, number in ems.items() if name != f"{settings.reference}/em")
    assert numbers["best/em_low"] <= numbers["best/em"] <= numbers["best/em_high"]
