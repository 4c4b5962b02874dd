"""A folder of one's own parts: found like the clone's files, hashed, guarded, and never in the place of one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks import conf, extends, identity, methods, own, params, parts, planned, retrieval
from tasks.methods import loader
from tasks.params import chosen, edit
from tasks.train.scoring import scores_by_reward
from tasks.types import Action, Question, Trajectory, Turn
from tests import shipped
from tests.shipped import ROOT

METHOD = "extends: search_r1_grpo\ntitle: Mine\nrewards: {answer: null, likes_short: {most: 3}}\n"
REWARD = '''\
"""Short answers are worth more."""

from dataclasses import dataclass
from typing import ClassVar

from tasks.rewards import EachReward, on_last_token
from tasks.rewards.likes_words import count


@dataclass(frozen=True)
class LikesShort(EachReward):
    components: ClassVar[tuple[str, ...]] = ("short",)
    most: int = 5

    def score(self, trajectory, question):
        short = float(count(trajectory.answer) <= self.most)
        return on_last_token(trajectory, short, short=short)


PART = LikesShort
'''
WORDS = '"""Counts words."""\n\n\ndef count(text):\n    return len((text or "").split())\n'
RETRIEVER = '''\
"""Finds nothing but the first passage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    backend: str
    much: int = 1


def build(corpus, work, settings, *others):
    raise NotImplementedError


def open_index(index_dir, manifest, num_threads=1):
    raise NotImplementedError
'''
SYSTEM = '''\
"""Says nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Silent:
    word: str = ""


PART = Silent
'''
FILES = {
    "conf/method/tested_here.yaml": METHOD,
    "conf/retriever/mine_first.yaml": "backend: first_alone\n",
    "tasks/rewards/likes_short.py": REWARD,
    "tasks/rewards/likes_words.py": WORDS,
    "tasks/retrieval/first_alone.py": RETRIEVER,
    "tasks/systems/silent.py": SYSTEM,
}
QUESTION = Question("q", "toy", "train", "Who ?", ("Anne",), 1)
TRAJECTORY = Trajectory(
    question_id="q",
    group_id="q",
    prompt_ids=(),
    response_ids=(0, 0),
    loss_mask=(True, True),
    sampler_logprobs=(0.0, 0.0),
    turns=(Turn(Action("answer", "Anne"), 0, 2, 2, "<answer> Anne </answer>"),),
    status="answered",
    answer="Anne",
)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, in use."""
    folder = tmp_path / "my parts"
    write(folder, FILES)
    monkeypatch.setenv(own.VARIABLE, str(folder))
    yield folder
    for name in [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(folder))
    ]:
        del sys.modules[name]


def used_by(name: str) -> dict[str, str]:
    """The source files of a method, as a plan lists them."""
    made = methods.build(loader.load(name, "smoke", ROOT), None)
    return identity.Sources(ROOT).used(identity.modules_of(made))


def test_a_part_of_the_folder_is_a_kind_and_its_files_are_sources_of_its_users_alone(mine: Path) -> None:
    before, other = used_by("tested_here"), used_by("search_r1_grpo")
    names = {"tasks/rewards/likes_short.py", "tasks/rewards/likes_words.py"}
    assert names <= before.keys()
    assert not names & other.keys()
    assert identity.outside(before) == {name: before[name] for name in names}
    assert identity.outside(other) == {}
    assert [path for path in before if Path(path).is_absolute()] == []
    assert "tested_here" in conf.names("method", ROOT)
    assert retrieval.load_settings("mine_first", ROOT).much == 1
    assert parts.make("systems", {"kind": "silent"}, "here").word == ""

    write(mine, {"tasks/rewards/likes_words.py": WORDS.replace("len((text", "1 + len((text")})
    after = used_by("tested_here")
    assert {path for path in before if before[path] != after[path]} == {"tasks/rewards/likes_words.py"}
    assert used_by("search_r1_grpo") == other
    assert list(mine.rglob("__pycache__")) == [], "the folder is an input of stage plan: using it must not change it"


def test_a_number_of_ones_own_method_is_set_by_its_name(mine: Path) -> None:
    with conf.setting({"method": {"tested_here": {"sampler": {"size": 7}}}}):
        assert extends.read("method", "tested_here", "smoke", ROOT)["sampler"]["size"] == 7
        assert extends.read("method", "search_r1_grpo", "smoke", ROOT)["sampler"]["size"] != 7
        assert conf.not_read() == set()
    told = r"Nearest: method\.tested_here\.rewards\.likes_short\.most \(conf/method/tested_here\.yaml\)"
    with pytest.raises(ValueError, match=told):
        chosen.parse("tested_here.most", 1, ROOT)


def test_without_the_folder_the_method_is_unknown(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own.VARIABLE, own.NONE)
    with pytest.raises(
        ValueError, match=r"unknown method 'tested_here'\. .* One of your own lies in a folder that PARTS= names\."
    ):
        loader.load("tested_here", "smoke", ROOT)
    with pytest.raises(ValueError, match="unknown kind 'likes_short'"):
        parts.make("rewards", {"kind": "likes_short"}, "here")


def test_the_settings_name_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `params.yaml`, for every command that is started without the variable, such as `dvc repro`."""
    monkeypatch.delenv(own.VARIABLE)
    for folder in ("conf", "requirements"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write(tmp_path / "a b", FILES)
    tree = yaml.safe_load((shipped.root() / "params.yaml").read_text()) | {
        "parts": "a b",
        "systems": ["base", "tested_here"],
    }
    write(tmp_path, {"params.yaml": yaml.safe_dump(tree)})
    assert params.read(tmp_path).systems == ("base", "tested_here")
    assert own.folder(tmp_path) == tmp_path / "a b"
    with pytest.raises(ValueError, match=r"^params.yaml: unknown system 'tested_here'"):
        params.check(tree | {"parts": own.NONE}, tmp_path)


@pytest.mark.parametrize(
    "words", [["METHODS=tested_here", "PARTS=a b"], ["PARTS=a b", "METHODS=tested_here"]], ids=" ".join
)
def test_the_command_line_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """In any order, for this run alone; one whose settings are kept names it for the next."""
    monkeypatch.delenv(own.VARIABLE)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    write(tmp_path / "a b", FILES)
    write(tmp_path, {"params.yaml": (shipped.root() / "params.yaml").read_text()})
    for without in (["METHODS=tested_here"], ["METHODS=tested_here", "PARTS=conf/parts/none.txt"]):
        with pytest.raises(ValueError, match=r"^params\.yaml: unknown system 'tested_here'"):
            edit.edited(edit.parse(without, tmp_path), tmp_path)
    _, changes = edit.edited(edit.parse(words, tmp_path), tmp_path)
    assert {line.partition(" ->")[2] for line in changes} == {" [base, tested_here]", " a b"}
    assert own.folder(tmp_path) is None

    edit.apply(edit.parse(words, tmp_path), tmp_path)
    _, changes = edit.edited(edit.parse(["METHODS=search_r1_grpo,tested_here"], tmp_path), tmp_path)
    assert changes == ["systems: [base, tested_here] -> [base, search_r1_grpo, tested_here]"]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tasks/rewards/answer.py": REWARD}, "tasks/rewards/answer.py is a file of the clone, too"),
        ({"conf/method/dspo.yaml": METHOD}, "conf/method/dspo.yaml is a file of the clone, too"),
        ({"tasks/types.py": ""}, "tasks/types.py is a file of the clone, too"),
        ({"conf/methods/mine.yaml": METHOD}, "conf/methods is no folder of settings. Known: .*method"),
        ({"rewards/mine.py": REWARD, "method/mine.yaml": METHOD}, "found neither conf/<kind>/<name>.yaml nor tasks/"),
        ({}, "found no such folder"),
    ],
)
def test_a_folder_that_would_be_overlooked_is_refused(tmp_path: Path, files: dict[str, str], told: str) -> None:
    write(tmp_path / "mine", files)
    with pytest.raises(ValueError, match=told) as caught:
        own.check(str(tmp_path / "mine"), ROOT)
    assert "\n" not in str(caught.value)


def test_the_clone_is_no_folder_of_ones_own() -> None:
    for name in (str(ROOT), "."):
        with pytest.raises(ValueError, match="found the clone itself"):
            own.check(name, ROOT)
    with pytest.raises(ValueError, match=r"found a file\. Name one that has conf/ and tasks/"):
        own.check("README.md", ROOT)


def test_an_unknown_kind_is_told_where_it_was_looked_for_and_the_nearest(mine: Path) -> None:
    with pytest.raises(ValueError, match="unknown kind 'likes_shor': tasks/rewards/ has no such part") as caught:
        parts.make("rewards", {"kind": "likes_shor"}, "here")
    assert f"(nor has {mine}/tasks/rewards/). Did you mean 'likes_short'?" in str(caught.value)


def test_the_guard_knows_the_folder(mine: Path) -> None:
    import tasks.rewards.likes_short  # type: ignore[import-not-found] # noqa: F401

    used = used_by("tested_here")
    everything = identity.loaded() | used.keys()
    files = dict.fromkeys(everything, "0") | used
    with planned.only_listed(planned.Plan({}, files, ""), "train@tested_here-0"):
        pass
    del files["tasks/rewards/likes_words.py"]
    with (
        pytest.raises(ValueError, match=r"the stage loads tasks/rewards/likes_words\.py, which is not among"),
        planned.only_listed(planned.Plan({}, files, ""), "train@tested_here-0"),
    ):
        pass

    plan = planned.Plan({}, used, "")
    sources = identity.Sources(ROOT)
    assert [path for path, digits in plan.files.items() if sources.changed(path, digits)] == []
    write(mine, {"tasks/rewards/likes_words.py": WORDS.replace("split()", "split('x')")})
    sources = identity.Sources(ROOT)
    assert [path for path, digits in plan.files.items() if sources.changed(path, digits)] == [
        "tasks/rewards/likes_words.py"
    ]


SCORE = "    def score(self, trajectory, question):\n"
BODY = REWARD[REWARD.index(SCORE) :]
COMPONENTS = '    components: ClassVar[tuple[str, ...]] = ("short",)\n'
NO_REWARD = (
    "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass A:\n    most: int = 5\n\n\nPART = A\n"
)
AT_PLAN = [
    ("most: int = 5", "most: int = = 5", r"SyntaxError: .*\(likes_short.py, line 13\)"),
    ("PART = LikesShort", "", r"tasks/rewards/likes_short\.py has no PART"),
    ("PART = LikesShort", "PART = LikesShort()", "expected a frozen dataclass"),
    ("import count", "import counts", r"cannot import name 'counts'.*\(likes_short.py, line 7\)"),
    ("trajectory, question)", "trajectory)", r"line 15: found score\(self, trajectory\), expected score\(self, tra"),
    ("question)", "question, services)", r"tasks/rewards/likes_short\.py, line 15: found score"),
    ("def score", "def scores", r"likes_short\.py, line \d+: cannot be made: TypeError: .*abstract method '?score"),
    (COMPONENTS, "", r"likes_short\.py, line \d+: cannot be made: TypeError: .*components"),
    (REWARD, NO_REWARD, r"line \d+: A has no \w+, which Reward of tasks/rewards/__init__\.py describes"),
    (
        "most: int = 5",
        "most: list = []",
        r"cannot be loaded: ValueError: mutable default.*\(likes_short.py, line \d+\)",
    ),
    ("PART = ", "raise SystemExit(0)\nPART = ", r"cannot be loaded: SystemExit: 0 \(likes_short.py, line \d+\)"),
    ("PART = ", "import sys\nsys.exit()\nPART = ", r"cannot be loaded: SystemExit:  \(likes_short.py, line \d+\)"),
    (
        "PART = ",
        "import argparse\nargparse.ArgumentParser().parse_args(['--no'])\nPART = ",
        r"cannot be loaded: SystemExit: 2 \(likes_short.py, line \d+\)",
    ),
]


@pytest.mark.parametrize(("old", "new", "told"), AT_PLAN)
def test_a_fault_of_ones_own_file_is_one_line_before_anything_runs(mine: Path, old: str, new: str, told: str) -> None:
    assert old in REWARD
    write(mine, {"tasks/rewards/likes_short.py": REWARD.replace(old, new)})
    with pytest.raises(ValueError, match=told) as caught:
        loader.load("tested_here", "smoke", ROOT)
    assert "rewards" in str(caught.value)
    assert "\n" not in str(caught.value)


RETURN = "        return "
AT_WORK = [
    (f"{RETURN}trajectory.answers[0]\n", r"tasks/rewards/likes_short\.py, line 16: AttributeError: "),
    (f"{RETURN}count(3)\n", r"tasks/rewards/likes_short\.py, line 16: AttributeError: "),
    (f"{RETURN}float('x')\n", r"tasks/rewards/likes_short\.py, line 16: ValueError: could not convert"),
    (f"{RETURN}1.0\n", r"question 'q'=1\.0: expected Scores, .* mend .*/tasks/rewards/likes_short\.py"),
    ("        pass\n", r"score for question 'q'=None: expected Scores"),
    (f"{RETURN}on_last_token(trajectory, 'much')\n", r"question 'q'='much': expected a finite number"),
    (
        f"        from tasks.types import Scores\n{RETURN}Scores(1.0, ((7, 1.0),))\n",
        r"token=7: expected 0 to 1, a token of the trajectory",
    ),
    (
        f"        from tasks.types import Scores\n{RETURN}Scores(0.0, [0.5, 0.5])\n",
        r"'q': placed=0\.5: expected \(token, value\); mend .*likes_short\.py",
    ),
    (
        f"        from tasks.types import Scores\n{RETURN}Scores(0.0, ((1,),))\n",
        r"'q': placed=\(1,\): expected \(token, value\)",
    ),
    (
        f"{RETURN}on_last_token(trajectory, 1.0, shrot=1.0)\n",
        r"'q': component='shrot': expected one of its components \('short',\)",
    ),
    *(
        (f"        from tasks.types import Scores\n{RETURN}Scores({made})\n", rf"'q': {told}")
        for made, told in {
            "1.0, None, {}": "placed=None: expected pairs of token and value; mend",
            "1.0, (), None": "components=None: expected a dict of numbers by name",
            "1.0, (), ['short']": r"components=\['short'\]: expected a dict",
            "1.0, (), {}, None": "notes=None: expected a tuple of Note",
            "1.0, (), {}, ('because',)": "notes='because': expected a Note",
        }.items()
    ),
    (
        f"        from tasks.types import Scores\n{RETURN}Scores(10**400, ())\n",
        r"question 'q'=10+\.\.\.0+: expected a finite number",
    ),
    ("        raise SystemExit(0)\n", r"line 16: SystemExit: 0 \(in a play of question 'q'\)\. Mend that file"),
    ("        import sys\n        sys.exit()\n", r"line 17: SystemExit: "),
    ("        raise RuntimeError('no')\n", r"line 16: RuntimeError: no \(in a play of question 'q'\)\. Mend that file"),
    (
        f"        ...\n\n    def __call__(self, trajectories, questions, services=None):\n{RETURN}[]\n",
        r"number of scores=0: expected 1, one each; mend .*/tasks/rewards/likes_short\.py",
    ),
]


@pytest.mark.parametrize(("body", "told"), AT_WORK)
def test_a_fault_at_work_is_one_line_that_names_file_and_line(mine: Path, body: str, told: str) -> None:
    write(mine, {"tasks/rewards/likes_short.py": REWARD.replace(BODY, f"{SCORE}{body}\n\nPART = LikesShort\n")})
    made = methods.build(loader.load("tested_here", "smoke", ROOT), None)
    with pytest.raises(ValueError, match=rf"^rewards: likes_short: .*{told}") as caught:
        scores_by_reward(made.rewards, [TRAJECTORY], [QUESTION], {})
    assert f"{mine}/tasks/rewards/likes_short.py" in str(caught.value), "where its user finds it"
    assert "\n" not in str(caught.value)


def test_a_component_of_two_rewards_is_refused(mine: Path) -> None:
    """The answer's exact match would be this reward's number, in metrics and in filters."""
    write(
        mine,
        {
            "conf/method/tested_here.yaml": METHOD.replace("answer: null, ", ""),
            "tasks/rewards/likes_short.py": REWARD.replace('("short",)', '("em",)').replace("short=short", "em=short"),
        },
    )
    told = r"rewards: likes_short: component 'em' is one of answer, too\. Give .* mend .*tasks/rewards/likes_short\.py"
    with pytest.raises(ValueError, match=told):
        methods.build(loader.load("tested_here", "smoke", ROOT), None)


def test_a_sound_reward_gives_its_scores(mine: Path) -> None:
    made = methods.build(loader.load("tested_here", "smoke", ROOT), None)
    ((scores,),) = scores_by_reward(made.rewards, [TRAJECTORY], [QUESTION], {})
    assert (scores.outcome, scores.placed, scores.components) == (1.0, ((1, 1.0),), {"short": 1.0})
