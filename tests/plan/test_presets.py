"""The presets of conf/preset: what they name exists, and the table of docs/cluster.md is what the sums say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks import conf, engine, generate, parts
from tasks.agent.rollout import RolloutConf
from tasks.model import LoraConf
from tasks.params.edit import PRESET, parse, preset_answers
from tasks.params.scale import Scale
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import Demand, Division, Learner, Served, phases
from tasks.plan.model_size import ModelSize
from tasks.plan.preflight import CLOSE
from tasks.train.settings import TrainConf
from tests import shipped

HOUSE = shipped.root()
PAGE = HOUSE / "docs/cluster.md"
SIZES = {
    "qwen2.5-3b": ModelSize(2048, 11_008, 36, 151_936, 16, 2, 128, is_tied=True, num_weights=3_085_938_688),
    "qwen2.5-7b": ModelSize(3584, 18_944, 28, 152_064, 28, 4, 128, is_tied=False, num_weights=7_615_616_512),
}
GB = 10**9


@pytest.mark.parametrize("preset", shipped.names("preset"))
def test_a_preset_names_files_that_exist(preset: str) -> None:
    answers = preset_answers(preset, HOUSE)
    assert set(answers) == set(PRESET)
    for kind, name in answers.items():
        conf.path_of(kind, name, HOUSE)
    engine.load(answers["engine"], HOUSE)
    generate.load(answers["generator"], HOUSE)


def test_other_words_stand_above_a_preset() -> None:
    words = ["SCALE=small", "PRESET=3b-8gpu", "GENERATOR=plain"]
    for order in (words, words[::-1]):
        found = parse(order, HOUSE)
        assert {key: found[key] for key in PRESET} == {
            "model": "qwen2.5-3b", "scale": "small", "engine": "zero2_8", "generator": "plain",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [0]\n", r"bad.yaml: key='seeds': expected one of model,"),
        ("model: 3\n", r"bad.yaml: model=3: expected the name"),
    ],
)
def test_a_wrong_preset_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "conf/preset").mkdir(parents=True)
    (tmp_path / "conf/preset/bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        preset_answers("bad", tmp_path)


def _peak(preset: str, card: float, has_critic: bool) -> tuple[float, str]:
    """GB of one GPU in the phase of training that takes most, and the phase."""
    answers = preset_answers(preset, HOUSE)
    scale = Scale(HOUSE, answers["scale"], "folder")
    tree: dict[str, Any] = parts.plain(engine.load(answers["engine"], HOUSE))
    division = (
        Division(tree["workers"], 8, tree["stage"], tree["offload"], tree["bucket"]) if "workers" in tree else None
    )
    plays: dict[str, Any] = parts.plain(generate.load(answers["generator"], HOUSE))
    plays = plays.get("of", plays)
    demand = Demand(
        SIZES[answers["model"]],
        Machine(Memory(2000 * GB, "memory"), Memory(int(card * GB), "GPU"), True, True),
        scale.section(TrainConf, "train"),
        scale.section(RolloutConf, "rollout"),
        LoraConf(),
        Learner(has_critic, True, False, 2560),
        None,
        Served(plays["gpu_memory_utilization"], 0),
        division,
    )
    by_phase = {phase.name: phase.size("GPU") / GB for phase in phases(demand)}
    name = max(by_phase, key=lambda phase: by_phase[phase])
    return by_phase[name], name


def _row(preset: str) -> str:
    cells = [f"`{preset}`"]
    for has_critic in (False, True):
        for card in (42.9, 85.9):  # What cards that are sold as 40 and 80 GB have.
            size, phase = _peak(preset, card, has_critic)
            fits = ("close" if size > CLOSE * card else "fits") if size <= card else f"needs {size:.0f} GB ({phase})"
            cells.append(f"{size:.0f} GB, {fits}" if size <= card else fits)
    return f"| {' | '.join(cells)} |"


def test_the_table_of_presets_is_what_the_sums_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for preset in shipped.names("preset"):
        assert _row(preset) in page, _row(preset)


def test_more_workers_leave_each_less_to_hold() -> None:
    few, many = (_peak(preset, 85.9, True)[0] for preset in ("7b-8gpu", "7b-2x8"))
    assert many < few
