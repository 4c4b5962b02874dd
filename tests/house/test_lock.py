"""The committed `dvc.lock` is one of the committed pipeline and settings; code is told apart by `dvc status`."""

from __future__ import annotations

import hashlib

import yaml
from dvc.repo import Repo

from tests.docs.documents import ROOT

REFRESH = "docs/commands.md says how dvc.lock is brought up to date"


def _paths(entries: list[dict[str, str]]) -> list[str]:
    return sorted(entry["path"] for entry in entries)


def test_the_lock_has_the_stages_inputs_and_outputs_of_the_pipeline() -> None:
    stages = yaml.safe_load((ROOT / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    noted = {name: (_paths(stage["deps"]), _paths(stage["outs"])) for name, stage in stages.items()}
    named = {
        stage.addressing: (sorted(dep.def_path for dep in stage.deps), sorted(out.def_path for out in stage.outs))
        for stage in Repo(str(ROOT)).index.stages
    }
    assert noted.keys() == named.keys(), REFRESH
    assert [name for name in named if noted[name] != named[name]] == [], REFRESH


def test_the_lock_is_that_of_the_settings() -> None:
    stages = yaml.safe_load((ROOT / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    (noted,) = [dep["md5"] for dep in stages["plan"]["deps"] if dep["path"] == "params.yaml"]
    assert noted == hashlib.md5((ROOT / "params.yaml").read_bytes()).hexdigest(), REFRESH
