"""What the killed run is cut to: the scale as it stands, with few steps."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.benchmarks.bench_kills import CUT, _cut
from tests.stages.clone import HOUSE


def test_a_cut_scale_has_the_same_keys_and_few_steps(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    shutil.copyfile(HOUSE / "conf/scale/small.yaml", path)
    whole = yaml.safe_load(path.read_text())
    _cut(path)
    cut = yaml.safe_load(path.read_text())

    def numbers(node: object, place: str = "") -> dict[str, object]:
        if not isinstance(node, dict):
            return {place: node}
        return {key: one for name, part in node.items() for key, one in numbers(part, f"{place}/{name}").items()}

    before, after = numbers(whole), numbers(cut)
    assert before.keys() == after.keys()
    changed = {place for place in before if before[place] != after[place]}
    assert {place.rpartition("/")[2] for place in changed} == CUT.keys()
    assert all(str(after[place]) == CUT[place.rpartition("/")[2]] for place in changed)


def test_a_scale_without_a_number_to_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("train: {num_steps: 4}\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: found no max_questions to cut")):
        _cut(path)
