"""What the killed run is cut to: the scale as it stands, with few steps."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.benchmarks.bench_kills import CUT, GENERATOR, LEARNS
from tests.stages.clone import HOUSE, cut


def test_a_cut_scale_has_the_same_keys_and_few_steps(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    shutil.copyfile(HOUSE / "conf/scale/small.yaml", path)
    whole = yaml.safe_load(path.read_text())
    cut(path, CUT)
    fewer = yaml.safe_load(path.read_text())

    def numbers(node: object, place: str = "") -> dict[str, object]:
        if not isinstance(node, dict):
            return {place: node}
        return {key: one for name, part in node.items() for key, one in numbers(part, f"{place}/{name}").items()}

    before, after = numbers(whole), numbers(fewer)
    assert before.keys() == after.keys()
    changed = {place for place in before if before[place] != after[place]}
    assert {place.rpartition("/")[2] for place in changed} == CUT.keys()
    assert all(str(after[place]) == CUT[place.rpartition("/")[2]] for place in changed)


def test_a_scale_without_a_number_to_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("train: {num_steps: 4}\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: found no max_questions to cut")):
        cut(path, CUT)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("python -m tasks.stages.train --system search_r1_grpo --seed 0", "tasks.stages.train"),
        ("/clone/.venv/bin/python -m tasks.engine.deepspeed_worker", "tasks.engine.deepspeed_worker"),
        ("/clone/.venv/bin/python -m tasks.generate.fleet_worker", "tasks.generate.fleet_worker"),
        ("python -m tasks.stages.evaluate --system base --seed 0", None),
        ("/clone/.venv/bin/python -m dvc repro --single-item train@base-0", None),
        ("/bin/sh -c python -m tasks.stages.train --system base --seed 0", None),
        ("python -m tasks.lifetime env -C /clone python -m tasks.engine.deepspeed_worker", None),
    ],
)
def test_the_single_process_that_is_killed_takes_part_in_learning(words: str, module: str | None) -> None:
    found = LEARNS.match(words)
    assert (found and found[1]) == module


def test_modules_that_take_part_in_learning_exist() -> None:
    for module in ("tasks.stages.base", "tasks.stages.train", "tasks.engine.deepspeed_worker", GENERATOR):
        assert LEARNS.match(f"python -m {module}")
        assert find_spec(module)
