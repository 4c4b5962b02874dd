"""A new kind of system is one file of code and one of settings: the real stages train, evaluate and report run it."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.stages.clone import HOUSE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "title"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A copy with the start policy, the new system and no method."""
    clone = Clone.make(tmp_path_factory.mktemp("system") / "clone")
    shutil.copyfile(HOUSE / "tests/systems/first_title.py", clone.root / "tasks/systems/first_title.py")
    settings = "kind: first_title\ntitle: First title\nnum_passages: 3\n"
    (clone.root / f"conf/system/{NAME}.yaml").write_text(settings)
    clone.set("systems", f"[base, {NAME}]")
    clone.must("data", "validate", "index", "recall", "retrievers", "augment", "base --seed 0")
    for name in ("base", NAME):
        clone.must(*(f"{stage} --system {name}" for stage in ("method", "train --seed 0", "evaluate --seed 0")))
    clone.must("report")
    return clone


def test_its_description_names_no_policy(clone: Clone) -> None:
    record = json.loads((clone.root / f"artifacts/train/{NAME}-0/system.json").read_text())
    assert (record["kind"], record["policy"], record["is_trained"]) == ("first_title", None, False)
    start = json.loads((clone.root / "artifacts/train/base-0/system.json").read_text())
    assert (start["kind"], start["policy"], start["made_by"]) == ("policy", "artifacts/base/0/policy", "base@0")
    assert [path.name for path in (clone.root / "artifacts/train/base-0").iterdir()] == ["system.json"]


def test_it_stands_in_table_and_page(clone: Clone) -> None:
    rows = [line.split(",") for line in (clone.root / "reports/results.csv").read_text().splitlines()]
    own = {(row[4], row[5]) for row in rows if row[0] == NAME}
    assert {("greedy", "em"), ("greedy", "em_minus_base"), ("sampled", "f1")} <= own
    assert not [row for row in rows if row[0] == NAME and row[4] == "training"]
    assert "| First title | 1 |" in (clone.root / "reports/results.md").read_text()
    assert "First title" in (clone.root / "reports/index.html").read_text()


def test_its_settings_are_checked_like_all_others(clone: Clone) -> None:
    clone.change(f"conf/system/{NAME}.yaml", "num_passages: 3", "num_passages: 0")
    done = clone.stage(f"train --system {NAME} --seed 0")
    assert done.returncode == 1
    assert "error: conf/system/title.yaml: num_passages=0: expected at least 1" in done.stderr
