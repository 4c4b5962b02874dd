"""Method files: two as written down, how they extend each other, round trips, and every way a file can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import methods
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.grammars.tool_call import ToolCallGrammar
from tasks.methods import loader
from tasks.rewards.answer import AnswerReward
from tasks.rewards.format_answer import FormatAnswerReward
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.losses import LossSum
from tasks.rl.losses.entropy import EntropyBonus
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.method import Method
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tests import shipped
from tests.tiny import PROMPT, load_method, make_tokenizer

ROOT = Path(__file__).parents[2]
NAMES = shipped.names("method")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of conf/ to spoil."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return tmp_path


def write(root: Path, name: str, tree: dict[str, Any]) -> None:
    (root / "conf" / "method" / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def change(root: Path, name: str, changes: dict[str, Any]) -> None:
    """Merge changes into a file, section by section."""
    tree = yaml.safe_load((root / "conf" / "method" / f"{name}.yaml").read_text())
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(tree.get(key), dict)
        tree[key] = tree[key] | value if both else value
    write(root, name, tree)


def mine(root: Path, scale: str = "laptop", **tree: Any) -> Method:
    """A method of one's own, from a file with these keys."""
    write(root, "mine", {"title": "Mine", **tree})
    return load_method("mine", scale, root=root)


# What a file says -----------------------------------------------------------------------------------------------------


def test_grpo_as_written_down() -> None:
    """Search-R1: group of 5, k3 in the loss, no critic."""
    method = load_method("search_r1_grpo", "paper")
    assert method.sampler.size == 5
    assert method.advantage == GroupAdvantage(eps=1e-6, deviation="sample")
    assert method.loss == LossSum((PolicyClip(0.2, 0.2, "token", "token_mean", 2.0), ReferenceKl(0.001, "token_mean")))
    assert method.value_loss is None
    assert method.rewards == (AnswerReward("em"),)
    assert (method.temperature, method.top_p) == (1.0, 1.0)
    budget = {"minibatches": 10, "policy": {"lr": 1e-6, "warmup_steps": 2864}}
    assert loader.load("search_r1_grpo", "paper", ROOT)["train"] == budget


def test_ppo_as_written_down() -> None:
    """One rollout, gamma = lambda = 1, k1 in the reward and none in the loss, value clip 0.5."""
    method = load_method("search_r1_ppo", "laptop")
    assert method.sampler.size == 1
    assert method.advantage == TokenGae(1.0, 1.0, 0.001, whiten_over="generated")
    assert method.loss == LossSum((PolicyClip(0.2, 0.2),))
    assert method.value_loss == ClippedValueLoss(0.5, over="generated")


def test_the_published_prompt() -> None:
    """Search-R1's, its misprint included; the methods share it."""
    (text,) = {load_method(name, "smoke").prompt.user for name in ("search_r1_grpo", "search_r1_ppo")}
    assert text.startswith(
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
    )
    assert "You can search as many times as your want." in text
    assert text.endswith("For example, <answer> Beijing </answer>. Question: {question}\n")


def test_as_released_values_are_options(root: Path) -> None:
    method = mine(
        root, extends="search_r1_ppo", advantage={"whiten_over": "response"}, value_loss={"over": "response"},
        losses={"entropy": {"coefficient": 0.001}}, sampling={"top_p": 0.95},
        rewards={"answer": None, "format_answer": {}},
    )  # fmt: skip
    assert method.loss == LossSum((PolicyClip(0.2, 0.2), EntropyBonus(0.001)))
    assert isinstance(method.advantage, TokenGae)
    assert method.advantage.whiten_over == "response"
    assert method.value_loss == ClippedValueLoss(0.5, over="response")
    assert method.rewards == (FormatAnswerReward(),)
    assert method.top_p == 0.95


def test_a_model_brings_its_own_prompt_and_grammar() -> None:
    method = methods.build(loader.load("dspo", "smoke", ROOT, PROMPT, SearchR1Grammar()), None)
    assert (method.prompt, method.grammar) == (PROMPT, SearchR1Grammar())
    own = load_method("dspo", "smoke")
    assert own.prompt.system == "You are a helpful and harmless assistant."
    assert own.grammar == ToolCallGrammar()


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_method_is_all_it_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It survives JSON with sorted keys, gives an equal method again, and no file is read for it."""
    for scale in ("smoke", "laptop", "paper"):
        resolved = loader.load(name, scale, ROOT)
        monkeypatch.chdir(tmp_path)
        again = json.loads(json.dumps(resolved, sort_keys=True))
        assert methods.build(again, None) == methods.build(resolved, None)
        assert again == resolved
        assert methods.build(again, make_tokenizer()).grammar.reserved


# Files that extend others ---------------------------------------------------------------------------------------------


def test_an_ablation_takes_what_it_does_not_give(root: Path) -> None:
    """`extends` over several files: parts and budgets, never title and rows."""
    ablation, whole = (loader.load(name, "paper", root) for name in ("stepsearch_ow_key", "stepsearch"))
    names = [reward["kind"] for reward in whole["rewards"]]
    assert names == ["answer", "key", "search_turns"]
    assert ablation["rewards"] == whole["rewards"][:2]
    differing = {key for key in whole if ablation[key] != whole[key]}
    assert differing == {"name", "title", "paper_rows", "rewards"}
    assert ablation["paper_rows"] == [["StepSearch", "ow key reward"], ["StepSearch", "w/o steps reward"]]
    write(root, "stepsearch_ow_key", {"extends": "stepsearch"})
    with pytest.raises(ValueError, match=r"stepsearch_ow_key\.yaml: key 'title' is missing"):
        loader.load("stepsearch_ow_key", "paper", root)


def test_a_part_of_another_kind_replaces_the_inherited_one_whole(root: Path) -> None:
    method = mine(root, extends="dspo", filter={"kind": "successful", "component": "subem"})
    assert repr(method.filter) == "Successful(component='subem')"  # no max_rounds of the filter before
    method = mine(root, extends="dspo", filter={"max_rounds": 3})
    assert repr(method.filter) == "MixedOutcomes(component='subem', max_rounds=3)"


def test_null_takes_away_and_a_new_part_goes_to_the_end(root: Path) -> None:
    method = mine(root, extends="stepsearch", rewards={"answer": None, "overlong": {"limit": 9, "buffer": 2}})
    assert [type(reward).__name__ for reward in method.rewards] == ["KeyReward", "SearchTurnReward", "OverlongPenalty"]
    write(root, "other", {"title": "x", "extends": "mine", "rewards": {"answer": {"metric": "em"}, "key": None}})
    rewards = load_method("other", "laptop", root=root).rewards
    assert rewards[0] == AnswerReward("em")  # its numbers are new, too: nothing is left of what was taken away
    assert [type(reward).__name__ for reward in rewards] == ["AnswerReward", "SearchTurnReward", "OverlongPenalty"]


@pytest.mark.parametrize(
    ("changes", "hidden", "again"),
    [
        (
            {"losses": {"policy_clip": {"low": 0.1}}},
            "losses: policy_clip: low=0.1 is hidden by losses: policy_clip: low=0.02 of scales: laptop, which it "
            "inherits from ",
            {"losses": {"policy_clip": {"low": 0.3}}},
        ),
        (
            {"losses": {"policy_clip": None}, "rewards": {"answer": {"metric": "f1"}}, "filter": {"component": "f1"}},
            "losses: policy_clip=None is hidden by losses: policy_clip: low=0.02 of scales: laptop",
            None,
        ),
    ],
)
def test_a_setting_that_an_inherited_one_of_the_scale_would_hide_is_refused(
    root: Path, changes: dict[str, Any], hidden: str, again: dict[str, Any] | None
) -> None:
    with pytest.raises(ValueError, match=r"mine\.yaml: ") as caught:
        mine(root, extends="dspo", **changes)
    assert hidden in str(caught.value)
    if again is not None:
        assert mine(root, "paper", extends="dspo", **changes).loss.terms[0].low == 0.1  # type: ignore[attr-defined]
        method = mine(root, extends="dspo", **changes, scales={"laptop": again})
        assert method.loss.terms[0].low == 0.3  # type: ignore[attr-defined]


def test_what_the_message_proposes_is_accepted(root: Path) -> None:
    with pytest.raises(ValueError, match="Set it there as well: ") as caught:
        mine(root, extends="dspo", losses={"policy_clip": {"low": 0.1}})
    proposal = yaml.safe_load(str(caught.value).partition("Set it there as well: scales: ")[2].removesuffix("."))
    method = mine(root, extends="dspo", losses={"policy_clip": {"low": 0.1}}, scales=proposal)
    assert method.loss.terms[0].low == 0.1  # type: ignore[attr-defined]


# Wrong files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filtre": {"kind": "keep_all"}}, "unknown key 'filtre'. Did you mean 'filter'?"),
        ({"losses": {"policy_clip": {"low": "wide", "high": 0.2}}}, ": losses: policy_clip: low: found 'wide'"),
        ({"losses": {"policy_clip": {"low": 1.4, "high": 0.2}}}, ": losses: policy_clip: low=1.4: expected a distance"),
        ({"losses": {"policy_clap": {}}}, ": losses: unknown kind 'policy_clap': tasks/rl/losses/ has no such part"),
        ({"losses": {"policy_clap": None}}, ": losses: unknown kind 'policy_clap'"),
        ({"losses": {"policy_clip": None, "reference_kl": None}}, ": losses={}: expected at least one term"),
        (
            {"losses": {"reference_kl": {"coefficient": 0}}},
            ": losses: reference_kl: coefficient=0.0: expected more than",
        ),
        (
            {"rewards": {"anwser": {}}},
            ": rewards: unknown kind 'anwser': tasks/rewards/ has no such part. Did you mean 'answer'? Known: answer",
        ),
        ({"rewards": {"format": {}}}, ": rewards: unknown kind 'format'"),  # a module that is no part
        ({"rewards": {"answer": None}}, ": rewards={}: expected at least one"),
        ({"rewards": {"answer": {"metrik": "em"}}}, ": rewards: answer: unknown key 'metrik'. Did you mean 'metric'?"),
        ({"rewards": 3}, ": rewards: found 3"),
        ({"advantage": {"kind": "grup"}}, ": advantage: unknown kind 'grup': tasks/rl/advantages/ has no such part"),
        ({"advantage": {"needs_values": True}}, ": advantage: unknown key 'needs_values'"),
        ({"advantage": "group"}, ": advantage: found 'group'"),
        ({"sampler": {"kind": "gold_answers", "size": 1}}, ": sampler: unknown key 'size'"),
        ({"sampler": {"kind": None}}, ": sampler: found {'kind': None"),
        ({"filter": {"max_rounds": 2}}, ": filter: unknown key 'max_rounds'"),
        (
            {"filter": {"kind": "mixed_outcomes", "component": "em", "max_rounds": 0}},
            ": filter: max_rounds=0: expected at l",
        ),
        ({"search": {"kind": "google"}}, ": search: unknown kind 'google': tasks/rl/search/ has no such part"),
        ({"grammar": "xml"}, ": grammar: found 'xml'"),
        ({"grammar": {"kind": "xml"}}, ": grammar: unknown kind 'xml': tasks/agent/grammars/ has no such part"),
        ({"prompt": "Answer."}, ": unknown prompt 'Answer.'. Known: dspo, r1,"),
        ({"prompt": 3}, ": prompt: found 3"),
        ({"sampling": {"top_p": 0}}, ": sampling: top_p=0: expected a number above 0 and 1 or less"),
        ({"sampling": {"temperature": -0.5}}, ": sampling: temperature=-0.5: expected 0"),
        ({"paper_rows": [["a", 3]]}, ": paper_rows[0][1]: found 3"),
        ({"paper_rows": [["a"]]}, ": paper_rows=(('a',),): expected pairs of two texts, [method, variant]"),
        ({"paper_rows": [["a", "b"], ["a", "b", "c"]]}, ": paper_rows=(('a', 'b'), ('a', 'b', 'c')): expected pairs"),
        ({"paper_rows": [["a", " "]]}, ": paper_rows=(('a', ' '),): expected pairs of two texts"),
        ({"title": ""}, ": title: found '', expected one line of printable text"),
        ({"title": "two\nlines"}, ": title: found 'two\\nlines', expected one line of printable text"),
        ({"train": 3}, ": train: found 3"),
        ({"scales": {"papr": {}}}, ": scales: unknown scale 'papr'. Did you mean 'paper'?"),
        ({"scales": {5: {}}}, ": scales: found 5, expected the name"),
        ({"scales": {"paper": {"policy": {}}, "smoke": {"policy": 1}}}, ": unknown key 'policy'"),
        ({"scales": {"paper": {"title": "x"}}}, ": scales: paper: key 'title' is the same at every scale"),
        ({"scales": {"paper": {"extends": "dspo"}}}, ": scales: paper: key 'extends' is the same at every scale"),
        ({"scales": {"paper": 3}}, ": scales: paper=3: expected a mapping of changes"),
        ({"scales": [1]}, ": scales=[1]: expected a mapping of scales to changes"),
        ({"extends": "search_r1_grpo"}, ": extends: goes round in a circle: search_r1_grpo -> search_r1_grpo"),
        (
            {"extends": "research"},
            "research.yaml: extends: goes round in a circle: search_r1_grpo -> research -> search",
        ),
        ({"extends": "../method/dspo"}, ": extends='../method/dspo': expected the name of another file"),
        ({"extends": "dsp"}, ": extends: unknown method 'dsp'. Did you mean 'dspo'?"),
    ],
)
def test_wrong_files(root: Path, changes: dict[str, Any], message: str) -> None:
    change(root, "search_r1_grpo", changes)
    with pytest.raises(ValueError, match=r"conf/method/(search_r1_grpo|research)\.yaml: ") as caught:
        loader.load("search_r1_grpo", "smoke", root)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("stepsearch", {"rewards": {"key": {"weight": -1.0}}}, ": rewards: key: weight=-1.0"),
        ("stepsearch", {"rewards": {"search_turns": {"penalty": -1.0}}}, ": rewards: search_turns: penalty=-1.0"),
        ("stepsearch", {"rewards": {"answer": {"wrong_format": 5.0}}}, ": rewards: answer: wrong_format=5.0"),
        (
            "mt_ppo",
            {"rewards": {"turn_rules": {"retrieval": 0.3, "invalid": 1.0}}},
            ": rewards: turn_rules: invalid=1.0",
        ),
        ("tips", {"rewards": {"potential": {"scale": -0.1}}}, ": rewards: potential: scale=-0.1"),
        (
            "search_r1_ppo",
            {"advantage": {"kind": "gae", "gamma": 2, "lam": 1, "kl_coefficient": 0}},
            ": advantage: gamma=2",
        ),
        (
            "search_r1_ppo",
            {"value_loss": {"kind": "clipped_value", "clip": 0.0}},
            ": value_loss: clip=0.0: expected a pos",
        ),
        ("zerosearch", {"search": {"noise_start": 2.0}}, ": search: noise_start=2.0"),
        (
            "research",
            {"rewards": {"f1_or_format": {"format_reward": 1.5}}},
            ": rewards: f1_or_format: format_reward=1.5",
        ),
        ("dapo", {"rewards": {"overlong": {"limit": 100, "buffer": 200}}}, ": rewards: overlong: buffer=200"),
    ],
)
def test_numbers_out_of_bounds(root: Path, name: str, changes: dict[str, Any], message: str) -> None:
    change(root, name, changes)
    with pytest.raises(ValueError, match=rf"conf/method/{name}\.yaml: ") as caught:
        loader.load(name, "paper", root)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("search_r1_ppo", {"value_loss": None}, "value_loss=None: expected a part: the advantage needs a critic"),
        (
            "search_r1_grpo",
            {"value_loss": {"kind": "clipped_value", "clip": 0.5}},
            "expected null: the advantage needs no",
        ),
        (
            "search_r1_grpo",
            {"sampling": {"temperature": 0.0}},
            "sampling: temperature=0.0: expected above 0: members that are alike",
        ),
        ("search_r1_grpo", {"sampler": {"size": 1}}, "sampler: size=1: expected at least 2, which are compared"),
        ("dspo", {"sampler": {"size": 1}}, "sampler: size=1: expected at least 2, which are compared"),
        ("dspo", {"rewards": {"answer": {"metric": "em"}}}, "filter: component='subem': expected one that a reward"),
        ("rejection_sampling", {"filter": {"component": "f1"}}, "filter: component='f1': expected one that a reward"),
        ("tips", {"services": {"log_probs": None}}, "services: nobody plays log_probs, which AnswerPotential calls"),
        ("tips", {"services": {"log_probs": "world"}}, "world.yaml: kind='world_documents' plays documents, expected"),
        (
            "tips",
            {"services": {"log_probs": "start_polcy"}},
            ": services: log_probs: unknown service 'start_polcy'. Did",
        ),
        ("search_r1_ppo", {"services": {"log_probs": "start_policy"}}, "services: log_probs is named, but no part"),
        ("search_r1_ppo", {"services": {"jury": "openai"}}, "unknown role 'jury'. Known: chat, log_probs,"),
        ("search_r1_ppo", {"services": {"chat": 3}}, ": services.chat: found 3"),
        (
            "pica",
            {"services": {"reward_model": "pica_as_released"}},
            "head='hazard': expected 'success', which Success",
        ),
        ("pica_as_released", {"services": {"reward_model": "pica"}}, "head='success': expected 'hazard', which Hazard"),
        (
            "r_search",
            {"grammar": {"kind": "search_r1"}},
            "rewards: evidence pays evidence, and grammar search_r1 shows n",
        ),
        ("r_search_wo_evidence", {"rewards": {"evidence_format": {"evidence": 0.2}}}, "evidence_format pays evidence"),
        ("zerosearch", {"search": None, "services": {"documents": "world"}}, ": search: found None"),
    ],
)
def test_parts_that_do_not_go_together(root: Path, name: str, changes: dict[str, Any], message: str) -> None:
    change(root, name, changes)
    with pytest.raises(ValueError, match=rf"conf/(method/{name}|service/world)\.yaml: ") as caught:
        loader.load(name, "laptop", root)
    assert message in str(caught.value)


def test_a_prompt_without_its_question_is_refused(root: Path) -> None:
    (root / "conf" / "prompt" / "search_r1.yaml").write_text("system: null\nuser: Answer.\n")
    with pytest.raises(ValueError, match=r"prompt/search_r1\.yaml: user='Answer\.': expected text with \{question\}"):
        loader.load("search_r1_grpo", "smoke", root)


@pytest.mark.parametrize("name", ["../scale/smoke", "/etc/passwd", "..", "", "search_r1_grop"])
def test_a_name_is_that_of_a_file(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="unknown method"):
        loader.load(name, "smoke", root)


@pytest.mark.parametrize(
    "key",
    [
        "title", "prompt", "grammar", "sampler", "sampling", "rewards", "filter", "advantage", "losses", "value_loss",
    ],
)  # fmt: skip
def test_missing_keys(root: Path, key: str) -> None:
    path = root / "conf" / "method" / "search_r1_grpo.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree[key]
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=f"search_r1_grpo.yaml: key '{key}' is missing"):
        loader.load("search_r1_grpo", "smoke", root)


def test_a_library_that_a_part_lacks_is_not_a_misspelt_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'judge'", name="judge")

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(
        ValueError, match=r"grammar: search_r1: .* cannot be loaded: ModuleNotFoundError: No .* 'judge'"
    ):
        loader.load("search_r1_grpo", "smoke", ROOT)
