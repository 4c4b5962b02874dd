"""The two files that DVC compares say what the table and the training records say, and nothing of a machine."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

from tasks.report import compared, table
from tasks.report.training import TrainingRun
from tests.report.fake_artifacts import SYSTEMS, write_artifacts


def test_the_metrics_of_each_system_are_the_figures_of_the_table(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, num_questions=12, steps=4)
    results = table.build(artifacts, list(SYSTEMS), [0, 1], "base", 100)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "of_another_run.json").write_text("{}")
    compared.write_metrics(tmp_path / "metrics", results)
    table.write_csv(tmp_path / "results.csv", results.cells)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {(r["policy"], r["metric"]): r for r in csv.DictReader(file) if _is_headline(r)}

    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "metrics").iterdir()}
    assert set(written) == set(SYSTEMS)
    for system, figures in written.items():
        for metric in ("em", "f1", "answer_in_passage", "searches"):
            found = [figures.pop(metric), *figures.pop(f"{metric}_interval")]
            assert found == [float(rows[system, metric][key]) for key in ("value", "low", "high")], (system, metric)
        assert figures == {}


def _is_headline(row: dict[str, str]) -> bool:
    return (row["seed"], row["dataset"], row["hops"], row["mode"]) == ("all", "all", "all", "greedy")


def test_a_curve_has_a_row_for_each_validation(tmp_path: Path) -> None:
    """Step 0 comes before any token; a step without a validation has no row; a method may generate nothing."""
    steps = ((0, {"validation_em": 0.25}), (1, {"loss": 1.0, "generated_tokens_total": 90}))
    last = (2, {"validation_em": 2 / 3, "generated_tokens_total": 181.0})
    reinforced = TrainingRun("search_r1_ppo", 1, (*steps, last), None, True, None, False)
    supervised = replace(reinforced, policy="sft", seed=0, rows=((3, {"validation_em": 0.5}),))
    compared.write_curves(tmp_path / "curves.csv", [reinforced, supervised])
    assert (tmp_path / "curves.csv").read_text().splitlines() == [
        "system,seed,step,tokens,validation_em",
        "search_r1_ppo,1,0,0,0.250000",
        "search_r1_ppo,1,2,181,0.666667",
        "sft,0,3,,0.500000",
    ]
