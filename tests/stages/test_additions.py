"""Everything that CONTRIBUTING says how to add is added as it says; real stages plan, train, evaluate and report it.

Each addition is a handful of files that are new or changed, counted in the clone, and the clone's own tests accept it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tasks.systems
from tasks import params, parts
from tasks.plan import RunSettings
from tests import shipped
from tests.services.completions import Answer, Completions, completion, serving
from tests.stages.additions import ADDITIONS, ASKED
from tests.stages.clone import HOUSE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

TITLE = "kind: first_title\ntitle: First title\nnum_passages: 3\n"
MOST = 6
"""Files of an addition."""
SOURCES = ("tasks", "flows", "conf", "requirements", "tests", "docs")
TRAINED = "best_of_three"
NUM_QUESTIONS = 4
"""Questions of a step, each with three candidates a turn."""
WATCHING = (
    "tests/methods/test_systems.py",
    "tests/methods/test_budgets.py",
    "tests/methods/test_papers.py::test_every_part_of_a_reward_or_a_loss_cites_its_paper",
    "tests/methods/test_papers.py::test_every_method_cites_its_paper_itself_or_by_the_file_it_extends",
    "tests/rewards/test_red_team.py",
    "tests/house/test_rooms.py::test_imports_point_one_way",
    "tests/house/test_rooms.py::test_only_a_part_imports_a_part",
)
"""Tests that look at every method or part."""


@dataclass(frozen=True)
class Project:
    """The clone with all additions, when all stages have run.

    Attributes:
        clone: may not be changed.
        touched: name of an addition -> files that it added or changed.
        printed: by the stage that trained.
    """

    clone: Clone
    touched: dict[str, set[str]]
    printed: str

    def json(self, path: str) -> Any:
        return json.loads((self.clone.root / path).read_text(encoding="utf-8"))

    def rows(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.clone.root / path).read_text(encoding="utf-8").splitlines()]


def _answer(body: dict[str, Any]) -> Answer:
    """The judge always gives the same score, the reader the same answer."""
    return 200, completion({"score": 0.75} if body["model"] == "judge" else "Avenor")


@pytest.fixture(scope="module")
def server() -> Iterator[Completions]:
    with serving() as found:
        found.answer = _answer
        yield found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, server: Completions) -> Project:
    """Start policy, two systems that are no policy, and a method made of everything that was added."""
    clone = Clone.make(tmp_path_factory.mktemp("additions") / "clone")
    ignored = shutil.ignore_patterns("__pycache__", *(name for one in ADDITIONS.values() for name in _tests_of(one)))
    for name in ("tests", "docs"):
        shutil.copytree(HOUSE / name, clone.root / name, ignore=ignored)
    shutil.copyfile(HOUSE / "pyproject.toml", clone.root / "pyproject.toml")
    for key, old, new in (
        ("num_steps", 3, 2),
        ("rollouts_per_step", 20, 3 * NUM_QUESTIONS),
        ("validate_questions", 8, 2),
        ("record_trajectories", 4, NUM_QUESTIONS),
    ):
        clone.change("conf/scale/smoke.yaml", f"{key}: {old}", f"{key}: {new}")
    clone.set("systems", "[base]")
    outside = clone.root.parent / "my parts"  # The system `title` lies there.
    for place in ("tasks/systems", "conf/system"):
        (outside / place).mkdir(parents=True)
    shutil.copyfile(HOUSE / "tests/systems/first_title.py", outside / "tasks/systems/first_title.py")
    (outside / "conf/system/title.yaml").write_text(TITLE)
    clone.set("parts", f"../{outside.name}")

    touched = {}
    for name, addition in ADDITIONS.items():
        before = _sources(clone)
        addition.put_into(clone, server.url)
        touched[name] = {path for path, content in _sources(clone).items() if before.get(path) != content}

    clone.must("data", "validate", "index", "recall", "retrievers", "augment", "base --seed 0")
    clone.must(
        f"inputs --system {TRAINED} --seed 0",
        *(f"train --system {name} --seed 0" for name in ("base", "title", "asked")),
    )
    done = clone.stage(f"train --system {TRAINED} --seed 0")
    assert done.returncode == 0, done.stdout + done.stderr
    clone.must(*(f"evaluate --system {name} --seed 0" for name in ("base", "title", "asked", TRAINED)), "report")
    return Project(clone, touched, done.stdout)


def _tests_of(addition: Any) -> list[str]:
    return [Path(place).name for place in addition.copied.values() if place.startswith("tests/")]


def _sources(clone: Clone) -> dict[str, bytes]:
    return clone.files(*SOURCES) | {"params.yaml": (clone.root / "params.yaml").read_bytes()}


# How many files, and which ------------------------------------------------------------------------------------------

PATH = re.compile(r"\b(?:(?:tasks|conf|tests|docs|requirements)/[\w/<>.-]+|params\.yaml)")


def _section(title: str) -> str:
    text = (HOUSE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## Adding {title}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return str(section)


def _named(text: str) -> list[re.Pattern[str]]:
    """The files that a text names; `<kind>` and an example's own name stand for any."""
    names = [re.sub(r"<\w+>", "*", path) for path in PATH.findall(text)]
    anything = [re.sub(r"^(conf/\w+)/\w+\.yaml$", r"\1/*.yaml", name) for name in names]
    return [re.compile(re.escape(name).replace(r"\*", r"\w+")) for name in anything]


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_is_at_most_six_files_and_those_that_contributing_names(project: Project, name: str) -> None:
    """What an item says to touch without "where" is touched."""
    touched, section = project.touched[name], _section(ADDITIONS[name].section)
    assert 1 < len(touched) <= MOST
    assert [path for path in sorted(touched) if not any(one.fullmatch(path) for one in _named(section))] == []
    for item in re.split(r"^(?=\d\. )", section, flags=re.MULTILINE)[1:]:
        is_optional = re.search(r"\bwhere\b", item)
        assert is_optional or any(one.fullmatch(path) for one in _named(item) for path in touched), item


def test_tests_that_look_at_all_files_accept_the_additions(project: Project) -> None:
    known = shipped.names("method")
    done = project.clone.pytest(*WATCHING, "-k", f"not ({' or '.join(known)})")
    assert done.returncode == 0, done.stdout + done.stderr


# Plan and training ----------------------------------------------------------------------------------------------------


def test_the_plan_has_the_new_sources_and_settings_for_their_user_alone(project: Project) -> None:
    plans = project.clone.root / "artifacts/plan"
    made, other, asked = (
        json.loads((plans / f"train/{name}-0.json").read_text()) for name in (TRAINED, "base", "asked")
    )
    sources = {path for one in ADDITIONS.values() for path in one.copied.values() if path.startswith("tasks/")}
    assert sources - made["files"].keys() == {"tasks/systems/asked_model.py"}
    assert sources & asked["files"].keys() == {"tasks/systems/asked_model.py"}
    assert not sources & other["files"].keys()
    assert {"tasks/services/endpoint.py", "tasks/rewards/turn_scores.py"} <= made["files"].keys()

    learning = made["settings"]["learning"]
    assert learning["engine"] == {"kind": "sharded", "num_workers": 2}
    method = learning["method"]
    assert method["sampler"] == {"kind": "candidates", "size": 3, "weight": 2**-10}
    assert method["services"]["turn_scores"] == {"kind": "parity", "even": 0.75, "odd": 0.25}
    assert (method["services"]["chat"]["kind"], method["services"]["chat"]["model"]) == ("endpoint", "judge")
    assert [reward["kind"] for reward in method["rewards"]] == ["answer", "turn_scores", "judge"]


def test_the_services_score_every_candidate(project: Project) -> None:
    """Each turn of each question was drawn three times, and both services saw all candidates at once."""
    steps = [row["metrics"] for row in project.rows(f"artifacts/train/{TRAINED}-0/metrics.jsonl") if row["step"] > 0]
    played = project.rows(f"artifacts/train/{TRAINED}-0/trajectories.jsonl")
    assert len(played) == 2 * NUM_QUESTIONS
    num_turns = sum(len(row["turns"]) for row in played)
    calls = [max(len(row["turns"]) for row in played if row["step"] == step) for step in (1, 2)]
    assert f"parity: {3 * num_turns} trajectories in {sum(calls)} calls\n" in project.printed
    sent, cached = map(int, re.findall(r"(\d+) requests sent, (\d+) replies", project.printed)[0])
    assert sent + cached == 3 * num_turns

    assert [metrics["judge_mean"] for metrics in steps] == [0.75, 0.75]
    assert all(0.25 <= metrics["turn_scores_mean"] <= 3 * 0.75 for metrics in steps)
    summary = project.json(f"artifacts/train/{TRAINED}-0/summary.json")
    assert summary["num_trajectories"] == len(played)


def test_a_turn_earns_what_the_services_said(project: Project) -> None:
    """The judge's 0.1 * 0.75, half of the parity's score, and 1 for a right answer; advantages compare candidates."""
    turns = [turn for row in project.rows(f"artifacts/train/{TRAINED}-0/trajectories.jsonl") for turn in row["turns"]]
    earned = {round(turn["reward"] - 0.075, 6) for turn in turns if turn["tokens"]}
    assert {0.125, 0.375} <= earned <= {0.125, 0.375, 1.125, 1.375}
    assert all(len(set(turn["advantages"])) == 1 for turn in turns if turn["tokens"])
    assert any(turn["advantages"][0] != 0 for turn in turns if turn["tokens"])


def test_the_engine_trained_and_the_generator_took_its_weights(project: Project) -> None:
    """The weight of a sample, 1/1024, shrinks the gradient, whose norm is about 1 without it."""
    root = project.clone.root
    workers = {path.name for path in (root / ".scratch/work").glob(f"train@{TRAINED}-0-*/checkpoints/*/policy/*")}
    assert workers == {"worker-0", "worker-1"}
    steps = [row["metrics"] for row in project.rows(f"artifacts/train/{TRAINED}-0/metrics.jsonl") if row["step"] > 0]
    assert all(0 < metrics["grad_norm"] < 0.01 for metrics in steps)
    assert all(metrics["logprob_gap_max"] < 1e-4 for metrics in steps)  # In step 2, of weights that have moved.
    trained, start = (project.json(f"artifacts/train/{name}-0/system.json") for name in (TRAINED, "base"))
    assert trained["policy_sha256"] != start["policy_sha256"]


# Evaluation and report ------------------------------------------------------------------------------------------------


def test_a_description_says_what_is_played(project: Project) -> None:
    start, title, asked = (project.json(f"artifacts/train/{name}-0/system.json") for name in ("base", "title", "asked"))
    assert (start["kind"], start["policy"], start["made_by"]) == ("policy", "artifacts/base/0/policy", "base@0")
    assert (title["kind"], title["policy"], title["is_trained"]) == ("first_title", None, False)
    assert (asked["kind"], asked["made_by"]) == ("asked_model", "train@asked-0")
    assert title["policy_sha256"] != asked["policy_sha256"]
    assert [path.name for path in (project.clone.root / "artifacts/train/base-0").iterdir()] == ["system.json"]


def test_a_system_outside_the_clone_is_one_of_the_run(project: Project) -> None:
    """Its file is a source of its stages, by its path in the folder, and no output names the folder."""
    plan = project.json("artifacts/plan/evaluate/title-0.json")
    assert "tasks/systems/first_title.py" in plan["files"]
    assert not (project.clone.root / "tasks/systems/first_title.py").exists()
    owned = {"tasks/systems/first_title.py": plan["files"]["tasks/systems/first_title.py"]}
    assert project.json(".scratch/ledger/evaluate@title-0.json")["own_parts"] == owned
    assert "own_parts" not in project.json(".scratch/ledger/evaluate@base-0.json")
    assert owned["tasks/systems/first_title.py"] in (project.clone.root / "reports/index.html").read_text()
    written = project.clone.files("artifacts")
    place = str(project.clone.root.parent).encode()
    assert [name for name, content in written.items() if place in content] == []


@pytest.mark.parametrize(
    ("name", "title"), [("title", "First title"), ("asked", "Asked model"), (TRAINED, "Best of three")]
)
def test_it_stands_in_table_and_page(project: Project, name: str, title: str) -> None:
    root = project.clone.root
    rows = [line.split(",") for line in (root / "reports/results.csv").read_text().splitlines()]
    measured = {(row[4], row[5]) for row in rows if row[0] == name}
    assert {("greedy", "em"), ("greedy", "em_minus_base"), ("sampled", "f1")} <= measured
    assert bool([row for row in rows if row[0] == name and row[4] == "training"]) == (name == TRAINED)
    assert f"| {title} | 1 |" in (root / "reports/results.md").read_text()
    assert title in (root / "reports/index.html").read_text()


def test_the_model_was_asked_once_a_question_in_each_mode(project: Project, server: Completions) -> None:
    rows = project.rows("artifacts/evaluate/asked-0/scores.jsonl")
    assert {row["answer"] for row in rows} == {"Avenor"}
    assert {row["prefill_tokens"] for row in rows} == {50}
    asked = [body for _, body, _ in server.asked if body["model"] == "reader"]
    assert len(asked) == len(rows) == 2 * len({row["question_id"] for row in rows})
    assert {body["temperature"] for body in asked} == {0, 1}


@pytest.fixture
def planning(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunSettings]:
    """Plans with the clone's kinds of systems, and with a copy of its settings."""
    kinds = project.clone.root / "tasks/systems"
    monkeypatch.setattr(parts, "_TASKS", project.clone.root / "tasks")
    monkeypatch.setattr(tasks.systems, "__path__", [*tasks.systems.__path__, str(kinds)])
    shutil.copytree(project.clone.root / "conf", tmp_path / "conf")
    yield RunSettings(tmp_path, params.read(project.clone.root))
    sys.modules.pop("tasks.systems.asked_model", None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "services: {chat: reader}",
            "",
            "asked.yaml: services={}: kind 'asked_model' calls others, expected {chat: <a",
        ),
        ("{chat: reader}", "{chats: reader}", "asked.yaml: services={'chats': 'reader'}: kind 'asked_mo"),
        ("chat: reader", "chat: none", "asked.yaml: services: chat: unknown service 'none'. Known: chat_judge, "),
        ("chat: reader", "chat: world", "kind='world_documents' plays documents, expected one that plays chat"),
        ("prompt: |", "num_passages: 0\nprompt: |", "conf/system/asked.yaml: num_passages=0: expected 1 or more"),
        (
            "kind: asked_model",
            "kind: asked",
            "asked.yaml: unknown kind 'asked': tasks/systems/ has no such part. Did you mean 'asked_model'?",
        ),
    ],
)
def test_its_settings_are_checked_like_all_others(planning: RunSettings, old: str, new: str, message: str) -> None:
    assert planning.system("asked")["kind"] == "asked_model"
    assert old in ASKED
    (planning.root / "conf/system/asked.yaml").write_text(ASKED.replace(old, new))
    with pytest.raises(ValueError) as caught:
        RunSettings(planning.root, planning.params).system("asked")
    assert message in str(caught.value)
