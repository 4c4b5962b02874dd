"""Method files: the two of Search-R1 as written down, and every way a file can be wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import methods
from tasks.rewards.answer import AnswerReward
from tasks.rewards.format_answer import FormatAnswerReward
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.losses import LossSum
from tasks.rl.losses.entropy import EntropyBonus
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tests.tiny import PROMPT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of conf/ to spoil."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return tmp_path


def change(root: Path, remove: str = "", **values: Any) -> None:
    path = root / "conf" / "method" / "search_r1_grpo.yaml"
    tree = yaml.safe_load(path.read_text()) | values
    tree.pop(remove, None)
    path.write_text(yaml.safe_dump(tree))


def test_grpo_as_written_down() -> None:
    """search_r1 sections 4 to 7: group of 5, k3 in the loss, no critic."""
    loaded = methods.load("search_r1_grpo", "paper", root=ROOT)
    method = loaded.method
    assert method.sampler.size == 5
    assert method.advantage == GroupAdvantage(eps=1e-6, deviation="sample")
    assert method.loss == LossSum((PolicyClip(0.2, 0.2, "token", "token_mean", 2.0), ReferenceKl(0.001, "token_mean")))
    assert method.value_loss is None
    assert method.rewards == (AnswerReward("em"),)
    assert (method.temperature, method.top_p) == (1.0, 1.0)
    assert loaded.train == {"policy": {"lr": 1e-6}}


def test_ppo_as_written_down() -> None:
    """One rollout, gamma = lambda = 1, k1 in the reward and none in the loss, value clip 0.5."""
    method = methods.load("search_r1_ppo", "laptop", root=ROOT).method
    assert method.sampler.size == 1
    assert method.advantage == TokenGae(1.0, 1.0, 0.001, whiten_over="generated")
    assert method.loss == LossSum((PolicyClip(0.2, 0.2),))
    assert method.value_loss == ClippedValueLoss(0.5, over="generated")


def test_the_published_prompt() -> None:
    """search_r1 section 2, its misprint included; the methods share it."""
    texts = {methods.load(name, "smoke", root=ROOT).method.prompt.user for name in ("search_r1_grpo", "search_r1_ppo")}
    (text,) = texts
    assert text.startswith(
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
    )
    assert "You can search as many times as your want." in text
    assert text.endswith("For example, <answer> Beijing </answer>. Question: {question}\n")


def test_as_released_values_are_options(root: Path) -> None:
    values = {
        "like": "search_r1_ppo", "title": "x", "whiten_over": "response", "value_loss_over": "response",
        "entropy_coefficient": 0.001, "top_p": 0.95, "reward": "format",
    }  # fmt: skip
    (root / "conf" / "method" / "released.yaml").write_text(yaml.safe_dump(values))
    method = methods.load("released", "laptop", root=root).method
    assert method.loss == LossSum((PolicyClip(0.2, 0.2), EntropyBonus(0.001)))
    assert isinstance(method.advantage, TokenGae)
    assert method.advantage.whiten_over == "response"
    assert method.value_loss == ClippedValueLoss(0.5, over="response")
    assert method.rewards == (FormatAnswerReward(),)
    assert method.top_p == 0.95


def test_a_model_brings_its_own_prompt(root: Path) -> None:
    assert methods.load("search_r1_grpo", "smoke", PROMPT, root=root).method.prompt == PROMPT


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clipp": 0.2}, "clipp"),
        ({"clip": "wide"}, "clip"),
        ({"clip": 1.4}, r"search_r1_grpo\.yaml: .*low=1\.4"),
        ({"top_p": 0}, r"search_r1_grpo\.yaml: .*top_p=0"),
        ({"temperature": -0.5}, "temperature"),
        ({"algorithm": "grp"}, "algorithm"),
        ({"module": "nowhere"}, r"module='nowhere': there is no tasks/methods/nowhere\.py"),
        ({"module": 3}, "module"),
        ({"prompt": "Answer."}, r"grpo\.yaml: unknown prompt 'Answer\.'\. Known: dspo, r1,"),
        ({"prompt": 3}, "key 'prompt' is missing or not text"),
        ({"scales": {"papr": {}}}, "grpo.yaml: scales: unknown scale 'papr'"),
        ({"scales": {5: {}}}, "grpo.yaml: scales: found 5, expected the name"),
        ({"scales": {"paper": {"policy": {}}}}, "grpo.yaml: scales: paper: unknown key 'policy'"),
        ({"scales": [1]}, r"grpo.yaml: scales=\[1\]: expected a mapping"),
        ({"train": 3}, "grpo.yaml: train=3: expected a mapping"),
        ({"module": "a.b"}, r"module='a.b': there is no tasks/methods/a.b.py"),
        ({"module": "__init__"}, "is no method: no Conf"),
        ({"like": "search_r1_grpo"}, "like: goes round in a circle: search_r1_grpo -> search_r1_grpo"),
        ({"like": "../method/dspo"}, "like='../method/dspo': expected the name of another file"),
        ({"like": "dsp"}, "grpo.yaml: like: unknown method 'dsp'"),
        ({"grammar": "xml"}, "grpo.yaml: grammar: found 'xml', expected a mapping with key 'kind'"),
        (
            {"grammar": {"kind": "xml"}},
            "grpo.yaml: grammar: unknown kind 'xml': tasks/agent/grammars/ has no",
        ),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient=-1.0"),
        ({"temperature": 0.0}, "temperature=0.0: expected above 0"),
        ({"rows": [["a", 3]]}, r"rows\[0\]\[1\]"),
    ],
)
def test_wrong_files(root: Path, values: dict[str, Any], message: str) -> None:
    change(root, **values)
    with pytest.raises(ValueError, match=message):
        methods.load("search_r1_grpo", "smoke", root=root)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("stepsearch", {"key_weight": -1.0}, "key_weight=-1.0"),
        ("stepsearch", {"penalty": -1.0}, "penalty=-1.0"),
        ("stepsearch", {"wrong_format": 5.0}, "wrong_format=5.0"),
        ("stepsearch", {"reward": "format"}, "gated=True: expected false with reward: format"),
        ("dspo", {"group_size": 1}, "group_size=1: expected at least 2"),
        ("dspo", {"clip_low": 1.0}, "low=1.0"),
        ("dspo", {"filter_rounds": -1}, "filter_rounds=-1"),
        ("dapo", {"overlong_buffer": 9999}, "buffer=9999"),
        ("research", {"format_reward": 5.0}, "format_reward=5.0"),
        ("mt_ppo", {"invalid": 2.0}, "invalid=2.0"),
        ("mt_ppo", {"retrieval": -1.0}, "retrieval=-1.0"),
        ("tips", {"potential_scale": -1.0}, "potential_scale=-1.0"),
        ("sft", {"group_size": 5}, "group_size=5: expected 1 with source: gold"),
        (
            "zerosearch",
            {"search": {"noise_start": 2.0, "noise_end": 0.5, "base": 4.0}},
            "noise_st",
        ),
    ],
)
def test_numbers_out_of_bounds(root: Path, name: str, values: dict[str, Any], message: str) -> None:
    path = root / "conf" / "method" / f"{name}.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))
    with pytest.raises(ValueError, match=rf"{name}\.yaml: .*{message}"):
        methods.load(name, "paper", root=root)


def test_an_ablation_takes_what_it_does_not_give(root: Path) -> None:
    """`like` over several files: settings and budgets, never title and rows."""
    loaded = methods.load("stepsearch_ow_key", "paper", root=root)
    whole = methods.load("stepsearch", "paper", root=root)
    assert loaded.settings == whole.settings | {"gain": 0.0, "penalty": 0.0}
    assert (loaded.train, loaded.rollout, loaded.prompting) == (whole.train, whole.rollout, whole.prompting)
    assert loaded.rows == (("StepSearch", "ow key reward"),)
    path = root / "conf" / "method" / "stepsearch_ow_key.yaml"
    path.write_text("like: stepsearch\n")
    with pytest.raises(ValueError, match=r"stepsearch_ow_key\.yaml: key 'title' is missing"):
        methods.load("stepsearch_ow_key", "paper", root=root)


def test_a_setting_that_an_inherited_one_of_the_scale_would_hide_is_refused(root: Path) -> None:
    path = root / "conf" / "method" / "wide.yaml"
    path.write_text("like: dspo\ntitle: wide\nclip_low: 0.1\n")
    assert methods.load("wide", "paper", root=root).settings["clip_low"] == 0.1
    with pytest.raises(ValueError, match=r"wide.yaml: clip_low=0.1 is hidden by clip_low=0.02 of scales: laptop"):
        methods.load("wide", "laptop", root=root)
    path.write_text("like: dspo\ntitle: wide\nclip_low: 0.1\nscales: {laptop: {settings: {clip_low: 0.3}}}\n")
    assert methods.load("wide", "laptop", root=root).settings["clip_low"] == 0.3


def test_a_prompt_without_its_question_is_refused(root: Path) -> None:
    (root / "conf" / "prompt" / "search_r1.yaml").write_text("system: null\nuser: Answer.\n")
    with pytest.raises(ValueError, match=r"prompt/search_r1\.yaml: user='Answer\.': expected text with \{question\}"):
        methods.load("search_r1_grpo", "smoke", root=root)


@pytest.mark.parametrize("name", ["../scale/smoke", "/etc/passwd", "..", ""])
def test_a_name_is_no_path(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="unknown method"):
        methods.load(name, "smoke", root=root)


@pytest.mark.parametrize("key", ["module", "title", "prompt", "clip", "group_size"])
def test_missing_keys(root: Path, key: str) -> None:
    change(root, remove=key)
    with pytest.raises(ValueError, match=key):
        methods.load("search_r1_grpo", "smoke", root=root)


def test_unknown_method(root: Path) -> None:
    with pytest.raises(ValueError, match="unknown method 'search_r1_grop'"):
        methods.load("search_r1_grop", "smoke", root=root)


def test_a_library_that_a_method_lacks_is_not_a_misspelt_method(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'judge'", name="judge")

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(ModuleNotFoundError, match="judge"):
        methods.load("search_r1_grpo", "smoke", root=root)
