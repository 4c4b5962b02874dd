"""Every number of `conf/` can be set for one run, with the checks of its file, and nothing is set in silence."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tasks import conf, engine, extends, generate, identity, params, parts, plan, planned, retrieval
from tasks.agent.rollout import RolloutConf
from tasks.augment.settings import AugmentConf
from tasks.base.settings import BaseConf, FormatConf, ModelConf, StartConf
from tasks.data.settings import DataConf
from tasks.methods import loader
from tasks.params import chosen, edit
from tasks.params.form import form_of
from tasks.params.scale import SECTIONS, Scale
from tasks.plan import RunSettings
from tasks.reader.settings import ReaderConf
from tasks.reward_model.settings import RewardModelConf
from tasks.stages import plan as plan_stage
from tasks.train.settings import TrainConf
from tests import shipped

HOUSE = shipped.root()

SOURCES = identity.Sources(identity.ROOT)  # Each file is read once.
CLASSES = {"base": BaseConf, "format": FormatConf, "rollout": RolloutConf, "train": TrainConf}
FILES = {
    "model": ModelConf, "data": DataConf, "augment": AugmentConf, "reader": ReaderConf, "start": StartConf,
    "reward_model": RewardModelConf,
}  # fmt: skip
Steps = tuple[Any, ...]
Key = tuple[str, str, str, Steps]


def numbers(node: Any, above: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Every number with the keys that lead to it; one of a list stands for the whole list."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from numbers(value, (*above, key))
    elif isinstance(node, list):
        if any(True for value in node for _ in numbers(value)):
            yield above, node
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield above, node


def walked(kind: str) -> Iterator[tuple[str, str, str, Steps, Any]]:
    """(file, scale, first words of the key, further words, number) for each number of the files of a folder."""
    for path in shipped.files(f"conf/{kind}", "*.yaml"):
        for steps, value in numbers(conf.read_yaml(path)):
            scale = "paper" if kind == "method" else "laptop"  # There no entry of `scales` hides what stands above.
            if steps[0] == "scales":
                scale, steps = steps[1], steps[2:]
            first = f"{kind}." if kind in chosen.ONE else f"{kind}.{path.stem}."
            if kind == "scale" or (kind == "data" and steps[0] in SECTIONS):
                first = ""
            yield path.stem, path.stem if kind == "scale" else scale, first, steps, value


def resolved(kind: str, name: str, scale: str, steps: Steps) -> Any:
    """The settings of a file as a plan has them."""
    if kind == "scale" or (kind == "data" and steps[0] in SECTIONS):
        made = Scale(HOUSE, scale, name if kind == "data" else "smoke").section(CLASSES[steps[0]], steps[0])
    elif kind in FILES:
        tree = extends.read(kind, name, scale, HOUSE)
        made = conf.fill(FILES[kind], {key: tree[key] for key in tree if kind != "data" or key not in SECTIONS}, "x")
    elif kind == "generator" and steps[0] == "train":
        tree = conf.section("scale", "small", HOUSE)["train"]
        made = conf.fill(TrainConf, conf.merge(tree, generate.training_changes(name, HOUSE)), "x")
    else:
        made = OTHERS[kind](name, scale)
    return conf.plain(made)


OTHERS: dict[str, Callable[[str, str], Any]] = {
    "retriever": lambda name, _: retrieval.load_settings(name, HOUSE),
    "engine": lambda name, _: engine.load(name, HOUSE),
    "generator": lambda name, _: generate.load(name, HOUSE),
    "service": lambda name, _: parts.make("services", conf.section("service", name, HOUSE), "x"),
    "method": lambda name, scale: loader.load(name, scale, HOUSE),
    "system": lambda name, _: RunSettings(HOUSE, shipped.settings()).system(name),
}
plain = functools.lru_cache(maxsize=None)(resolved)


def others_of(value: Any) -> Iterator[Any]:
    """Other values that a setting may take."""
    if isinstance(value, list):
        yield value[:-1]
        yield [*value[:-1], value[0]]
        for at in range(len(value)):
            for other in others_of(value[at]):
                yield [*value[:at], other, *value[at + 1 :]]
        if all(isinstance(one, float) for one in value):  # Shares of 1.
            yield [value[0] + 0.1, value[1] - 0.1, *value[2:]]
    elif isinstance(value, float):
        yield from (value * 0.99, value * 1.01, value + 0.01, value - 0.01, value / 2)
    else:
        yield from (value + 1, value - 1, value * 2, value // 2)


def is_set(kind: str, name: str, scale: str, words: list[str], steps: Steps) -> bool:
    answers = edit.set_answers(" ".join(words), {"set": {}}, HOUSE)
    try:
        with conf.setting(answers["set"]):
            found = resolved(kind, name, scale, steps)
            assert not conf.not_read()
    except ValueError:
        return False
    return bool(found != plain(kind, name, scale, steps))


def sibling(kind: str, name: str, scale: str, steps: Steps, value: Any) -> Iterator[str]:
    """The word that takes from another share what is added to this one."""
    for other_name, other_scale, first, others, share in walked(kind):
        if (
            (other_name, other_scale) == (name, scale)
            and others[:-1] == steps[:-1]
            and others != steps
            and isinstance(share, float)
        ):
            yield f"{first}{'.'.join(map(str, others))}={share - value * 0.01}"


@pytest.mark.parametrize("kind", sorted({path.parent.name for path in shipped.files("conf", "*/*.yaml")}))
def test_every_number_of_conf_can_be_set_for_one_run(kind: str) -> None:
    if kind in chosen.OTHERS and kind != "scale":
        with pytest.raises(ValueError, match=f"SET: {kind}: it cannot be set here; "):
            chosen.parse(f"{kind}.x", 1, HOUSE)
        return
    left, seen = [], set()
    for name, scale, first, steps, value in walked(kind):
        if kind == "method" and steps[-2:] in seen:  # Dozens of methods have the same parts.
            continue
        seen.add(steps[-2:])
        if steps[0] == "evaluate":
            assert f"evaluate.{steps[1]}" in edit.SETTINGS
            continue
        key = f"{first}{'.'.join(map(str, steps))}"
        if key == "format.read.stop_loss":  # It may be 0 alone.
            continue
        words = ([f"{key}={yaml.safe_dump(one, default_flow_style=True).split(chr(10))[0].replace(' ', '')}"]
                 for one in others_of(value))  # fmt: skip
        if any(is_set(kind, name, scale, word, steps) for word in words):
            continue
        more = [f"{key}={value * 1.01}"] if isinstance(value, float) else []
        pairs = ([*more, other] for other in sibling(kind, name, scale, steps, value) if more)
        if not any(is_set(kind, name, scale, pair, steps) for pair in pairs):
            left.append(f"{name} at {scale}: {key}={value}")
    assert left == []


def planned_with(text: str, *names: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Settings in the plans of these stages, with what stands after `SET=`."""
    answers = edit.set_answers(text, {"set": {}}, HOUSE)
    run = RunSettings(HOUSE, params.with_models(replace(shipped.settings(), **changes), HOUSE))
    with chosen.standing(answers["set"], HOUSE):
        found = dict(plan.plans(run, {name: plan_stage.stages()[name] for name in names}, SOURCES))
        chosen.require_used(HOUSE)
    return {name: made.settings for name, made in found.items()}


def test_what_is_set_wins_over_every_file_and_only_what_reads_it_changes() -> None:
    """gspo_high_lr sets a learning rate of its own over that of the scale."""
    systems = ("base", "gspo_high_lr", "search_r1_ppo")
    text = "train.policy.lr=7e-5 rollout.top_k=2 method.search_r1_ppo.losses.policy_clip.low=0.1 retriever.k1=1.3"
    before = planned_with("", "train", "data", "index", systems=systems, seeds=(0,))
    found = planned_with(text, "train", "data", "index", systems=systems, seeds=(0,))
    assert before["train@gspo_high_lr-0"]["learning"]["train"]["policy"]["lr"] == 1e-3
    for name in ("gspo_high_lr", "search_r1_ppo"):
        learning = found[f"train@{name}-0"]["learning"]
        assert learning["train"]["policy"]["lr"] == 7e-5
        assert learning["train"]["critic"] == before[f"train@{name}-0"]["learning"]["train"]["critic"]
        assert learning["rollout"]["top_k"] == 2
    lows = [found[f"train@{name}-0"]["learning"]["method"]["losses"][0]["low"] for name in systems[1:]]
    assert lows[1] == 0.1 != lows[0]
    assert "'k1': 1.3" in str(found["index"])
    assert found["data"] == before["data"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train.polcy.lr=1e-4", ["conf/scale/laptop.yaml: train: unknown key 'polcy'. Did you mean 'policy'?",
                                 "Nearest: train.policy.lr (conf/scale/laptop.yaml)",
                                 "Set for this run: train.polcy.lr=0.0001."]),
        ("train.policy.lr=-1", ["lr=-1: expected a number above 0", "Set for this run: train.policy.lr=-1."]),
        ("train.policy.lr=fast", ["found 'fast'", "Set for this run: train.policy.lr=fast."]),
        ("train.policy=3", ["train: policy: found 3, expected a mapping"]),
        ("method.search_r1_grpo.sampler.sise=8", ["conf/method/search_r1_grpo.yaml: sampler: unknown key 'sise'",
                                                  "Nearest: method.search_r1_grpo.sampler.size"]),
        ("reward_model.pica.fit.lr=1e-4", ["SET: reward_model.pica: nothing that this run uses has this setting"]),
        ("format.read.max_steps=3", ["SET: format.read: nothing that this run uses"]),
        ("method.dspo.sampler.size=8", ["SET: method.dspo: nothing that this run uses"]),
        ("service.openai.timeout_s=1", ["SET: service.openai: nothing that this run uses"]),
    ],
)  # fmt: skip
def test_what_is_wrong_or_hits_nothing_is_an_error(text: str, told: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        planned_with(text, "index", "base", "train", systems=("base", "search_r1_grpo"), seeds=(0,))
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["LR=1e-4"], 'Those of conf/ stand in SET="train.policy.lr=1e-4". Nearest: train.policy.lr (conf/scale/lap'),
        (["lr=1e-4"], 'stand in SET="train.policy.lr=1e-4"'),
        (["SET=lr=1e-4"], "SET: lr: there is no such setting. Nearest: train.policy.lr (conf/scale/laptop.yaml)"),
        (["SET=trian.policy.lr=1"], "SET: trian: there is no such setting. Nearest: train.policy.lr (conf/scale/"),
        (["NUM_STEPS=5"], 'SET="train.num_steps=5"'),
        (["K1=1"], 'SET="retriever.k1=1". Nearest: retriever.k1 (conf/retriever/bm25.yaml)'),
        (["SET=evaluate.foo=1"], "SET: evaluate: it cannot be set here; params.yaml has a section of this name"),
        (["SET=train=1"], "SET: train=1: expected a key below it, such as train.num_steps"),
        (["SET=train.policy.lr"], "SET: found 'train.policy.lr', expected key=value"),
        (["SET=train..lr=1"], "SET: found 'train..lr=1', expected key=value"),
        (["SET=train.policy.lr='1"], "No closing quotation. Put a value with blanks into quotes."),
        (["SET=train.policy.betas=[1"], "the value is not YAML"),
        (["MODEL=gpt2"], "organisation/name, such as MODEL=openai-community/gpt2"),
        (["MODEL=./nowhere"], "is named by the folder or the GGUF file that it lies in"),
    ],
)
def test_an_unknown_setting_is_told_where_the_nearest_stands(words: list[str], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        edit.edited(edit.parse(words, HOUSE), HOUSE)
    assert told in str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(HOUSE / "conf", tmp_path / "conf")
    shutil.copyfile(shipped.root() / "params.yaml", tmp_path / "params.yaml")
    return tmp_path


def test_it_is_written_into_params_and_stands_in_the_form(root: Path) -> None:
    words = ["SET=train.policy.lr=1e-4 'train.policy.betas=[0.8, 0.9]' evaluate.top_k=4", "rollout.top_k=5"]
    changes = edit.apply(edit.parse(words, root), root)
    line = "train.policy.lr=0.0001 'train.policy.betas=[0.8, 0.9]' rollout.top_k=5"
    assert changes == ["evaluate.top_k: 0 -> 4", f"set: nothing -> {line}"]
    tree = {"train": {"policy": {"lr": 1e-4, "betas": [0.8, 0.9]}}, "rollout": {"top_k": 5}}
    assert params.read(root).set == tree

    assert edit.parse(["train.num_steps=9"], root)["set"] == conf.merge(tree, {"train": {"num_steps": 9}})
    form = form_of(root)
    assert form().rare.set == line  # type: ignore[attr-defined]
    assert edit.edited(form().answers(), root)[1] == []
    filled = form.model_validate({"rare": {"set": "train.num_steps=3"}})
    assert filled.answers()["set"] == {"train": {"num_steps": 3}}
    schema = form.model_json_schema()
    assert schema["$defs"]["Rare"]["properties"]["set"]["type"] == "string"
    with pytest.raises(ValueError, match=re.escape("Nearest: train.policy.lr")):
        form.model_validate({"rare": {"set": "lr=1"}}).answers()

    edit.apply({"set": {}}, root)
    assert (root / "params.yaml").read_text() == (HOUSE / "params.yaml").read_text().replace("top_k: 0", "top_k: 4")


def test_a_block_as_dvc_writes_it_is_read_and_a_wrong_one_named(root: Path) -> None:
    """`dvc exp run -S` writes nested keys."""
    text = (root / "params.yaml").read_text().replace("set: {}", "set:\n  train:\n    policy:\n      lr: 0.0001\n#")
    (root / "params.yaml").write_text(text)
    assert params.read(root).set == {"train": {"policy": {"lr": 1e-4}}}
    assert "lr: 0.0001" not in edit.edited(edit.parse(["train.policy.lr=2e-4"], root), root)[0].decode()
    (root / "params.yaml").write_text(text.replace("train:", "trian:"))
    with pytest.raises(ValueError, match=r"params.yaml: trian: there is no such setting. Nearest: train.policy.lr"):
        params.read(root)


def stage_plan(root: Path, text: str) -> None:
    """Stage `plan` of a small run whose `params.yaml` has this after `set`."""
    (root / "requirements").symlink_to(HOUSE / "requirements")
    tree = yaml.safe_load((root / "params.yaml").read_text()) | {"systems": ["base", "search_r1_grpo"], "seeds": [0]}
    (root / "params.yaml").write_text(yaml.safe_dump(tree | {"set": yaml.safe_load(text)}))
    ctx: Any = SimpleNamespace(root=root)
    plan_stage.body(ctx)


@pytest.mark.parametrize(
    ("text", "stage", "key", "value"),
    [
        ("{train: {policy: {lr: 7.0e-5}}}", "train@search_r1_grpo-0", "learning.train.policy.lr", 7e-5),
        ("{retriever: {k1: 1.3}}", "index", "retriever.k1", 1.3),
    ],
)
def test_what_params_sets_stands_in_the_plan_that_the_stage_writes(
    root: Path, text: str, stage: str, key: str, value: float
) -> None:
    stage_plan(root, text)
    assert chosen.dotted(planned.read(root, stage).settings)[key] == value


def test_the_stage_writes_no_plan_where_a_setting_hits_nothing(root: Path) -> None:
    with pytest.raises(ValueError, match=r"^SET: reward_model\.pica: nothing that this run uses has this setting"):
        stage_plan(root, "{reward_model: {pica: {fit: {lr: 1.0e-4}}}}")
    assert not (root / planned.FOLDER).exists()


def test_a_key_of_a_file_comes_before_a_file_of_this_name() -> None:
    """conf/data/world.yaml has a section `world`."""
    for name in ("world", "smoke"):
        with conf.setting({"data": {"world": {"seed": 2}}}):
            assert extends.read("data", name, "laptop", HOUSE)["world"]["seed"] == 2
            assert conf.not_read() == set()
    with conf.setting({"retriever": {"dense": {"batch_size": 2}}}):
        assert conf.section("retriever", "bm25", HOUSE) == conf.read_yaml(HOUSE / "conf/retriever/bm25.yaml")
        assert conf.not_read() == {("retriever", "dense")}
    with conf.setting({"retriever": {"bm25": 3}}), pytest.raises(ValueError, match=r"retriever.bm25=3: expected sett"):
        conf.section("retriever", "bm25", HOUSE)
    assert conf.not_read() == set()


def test_dvc_writes_it_into_the_section_set(root: Path) -> None:
    """What `dvc exp run -S '+set.train.policy.lr=1e-4'` does with the file; DVC asks the same function."""
    from dvc.utils.hydra import apply_overrides

    apply_overrides(root / "params.yaml", ["+set.train.policy.lr=1e-4", "+set.rollout.top_k=5"])
    assert params.read(root).set == {"train": {"policy": {"lr": 1e-4}}, "rollout": {"top_k": 5}}
    apply_overrides(root / "params.yaml", ["set.train.policy.lr=2e-4"])
    assert params.read(root).set["train"] == {"policy": {"lr": 2e-4}}
