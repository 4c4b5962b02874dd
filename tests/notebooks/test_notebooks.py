"""Every notebook runs from top to bottom on a made-up finished run and is committed without output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.fake_artifacts import SYSTEMS, write_artifacts

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_holds_no_output(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.report import table

    write_artifacts(tmp_path)
    results = table.build(tmp_path / "artifacts", SYSTEMS, [0, 1], "base", 100)
    table.write_csv(tmp_path / "reports" / "results.csv", results.cells)
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert not names["gain"].empty  # type: ignore[attr-defined]
    assert list(tmp_path.rglob("*.ipynb")) == []
