"""Every notebook runs from top to bottom on a made-up result table and is committed without output."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tasks.report.table import Cell, write_csv
from tests import shipped

NOTEBOOKS = shipped.files("notebooks", "*.ipynb")
(BY_HOPS,) = [path for path in NOTEBOOKS if path.stem == "gain_by_hops"]
GAINS = {"1": (-0.01, -0.02, 0.0), "2": (0.7, 0.6, 0.8), "4": (0.4, 0.3, 0.5)}
"""Number of hops -> gain and its interval; beyond one hop it falls."""


def _cell(policy: str, hops: str, metric: str, value: float, low: float, high: float, seed: str = "all") -> Cell:
    return Cell(
        policy, seed, "all", hops, "greedy", metric, value, low, high, 9, "data", "policy", "settings", "questions"
    )


def _rows() -> list[Cell]:
    """Two policies, one gain, and rows that no table by hops may take in."""
    rows = [_cell("ppo - base", "all", "em", 0.5, 0.4, 0.6), _cell("ppo", "all", "em_minus_base", 0.5, 0.4, 0.6)]
    for hops, gain in GAINS.items():
        rows += [_cell(policy, hops, name, 0.5, 0.4, 0.6) for policy in ("base", "ppo") for name in ("em", "searches")]
        rows += [_cell("ppo", hops, "em_minus_base", *gain), _cell("ppo", hops, "em_minus_base", 1.0, 1.0, 1.0, "0")]
    return rows


def run(path: Path, root: Path) -> tuple[dict[str, Any], list[Any]]:
    """The names that a notebook leaves, and what its cells show, over the result table in `root`."""
    write_csv(root / "reports" / "results.csv", _rows())
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            tree = ast.parse("".join(cell["source"]), path.name)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, path.name, "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
    return names, shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_holds_no_output(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(not table.empty for table in run(path, tmp_path)[1])
    assert list(tmp_path.rglob("*.ipynb")) == []


def test_gains_stand_with_their_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_hops, gain, searches = run(BY_HOPS, tmp_path)[1]
    assert list(by_hops.columns) == list(gain.columns) == ["value", "low", "high", "interval_over"]
    assert list(by_hops.index) == [(hops, policy) for hops in GAINS for policy in ("base", "ppo")]
    assert {hops: tuple(row[["value", "low", "high"]]) for (hops, _), row in gain.iterrows()} == GAINS
    assert searches.shape == (3, 2)
