"""The plan of a run: which settings and which files each stage gets, for the configurations of the house."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, extends, identity, libraries, params, plan, planned, services, systems
from tasks.base.settings import FormatConf
from tasks.model import export_folder
from tasks.params import Params
from tasks.plan import RunSettings
from tasks.planned import Plan
from tasks.reached import REACHED_BY
from tasks.services.endpoint import Endpoint
from tasks.stages.plan import stages
from tasks.stages.train import _check_budgets
from tests import shipped
from tests.tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
SOURCES = identity.Sources(identity.ROOT)  # Each file is read once.
METHODS = tuple(shipped.names("method"))


def _planned(*names: str, **changes: Any) -> dict[str, Plan]:
    """Plans of these stages (all without a name), with changes of `params.yaml`."""
    run = RunSettings(ROOT, params.with_models(replace(shipped.settings(), **changes), ROOT))
    return dict(plan.plans(run, {name: stages()[name] for name in names or stages()}, SOURCES))


def _files(plan: Plan, folder: str) -> set[str]:
    return {path.removeprefix(f"tasks/{folder}/") for path in plan.files if path.startswith(f"tasks/{folder}/")}


@pytest.mark.parametrize(
    ("scale", "model"), [("smoke", "tiny"), ("laptop", "tiny"), ("small", "smollm2-135m"), ("paper", "qwen2.5-3b")]
)
def test_every_method_can_be_planned_and_its_settings_survive_the_file(scale: str, model: str, tmp_path: Path) -> None:
    # A given model that is taught knows one grammar; methods with tags of their own begin with a tiny policy.
    names = [
        name for name in METHODS if scale != "small" or "start" not in extends.read("method", name, "laptop", ROOT)
    ]
    found = _planned(scale=scale, model=model, systems=("base", *names), seeds=(0,))
    assert {f"train@{name}-0" for name in names} < found.keys()
    for name, made in found.items():
        planned.write(tmp_path / planned.FOLDER, name, made)
        read = planned.read(tmp_path, name)
        assert read == made
        module = stages()[name.partition("@")[0]]
        settings = planned.settings_of(read, module.Settings, name)
        assert conf.plain(settings) == made.settings
        if hasattr(module, "loads"):
            modules = {module.__name__} | identity.modules_of([settings, module.loads(settings)])
            assert SOURCES.used(modules) == made.files


def test_a_method_gets_the_files_of_its_parts_and_of_no_others() -> None:
    found = _planned("train", systems=("base", "stepsearch", "search_r1_grpo", "tips"), seeds=(0,))
    grpo, step, tips = (found[f"train@{name}-0"] for name in ("search_r1_grpo", "stepsearch", "tips"))
    assert _files(grpo, "rewards") == {"__init__.py", "answer.py", "format.py"}
    assert {"key.py", "search_turns.py"} <= _files(step, "rewards")
    assert _files(grpo, "rl/advantages") == {"__init__.py", "group.py"}
    assert _files(step, "rl/advantages") == {"__init__.py", "gae.py"}
    assert "start_policy.py" in _files(tips, "services")
    assert _files(grpo, "services") == {"__init__.py"}


def test_an_evaluation_needs_no_engine_no_reward_and_no_loss() -> None:
    made = _planned("evaluate", seeds=(0,))["evaluate@search_r1_grpo-0"]
    for folder in ("engine", "rewards", "rl", "train", "methods", "base", "plan"):
        assert not _files(made, folder), folder


SUPERVISED = ("base@0", "start@r_search-0", "reader@tiny_llama-0", "reward_model@pica-0")


def test_a_supervised_training_depends_on_an_engine_only_where_it_divides_it() -> None:
    """Else a change of the plain engine would teach every start policy anew."""
    names = [name.partition("@")[0] for name in SUPERVISED]
    chosen = {"systems": ("base", "pica", "r_search"), "seeds": (0,)}
    plain, divided = (_planned(*names, engine=engine, **chosen) for engine in ("plain", "deepspeed"))
    for name in SUPERVISED:
        assert plain[name].settings["engine"] is None
        assert not _files(plain[name], "engine"), name
        assert divided[name].settings["engine"] == conf.plain(
            {"kind": "deepspeed", "workers": 2, "stage": 2, "offload": False, "bucket": 2**26, "timeout_s": 600.0}
        )
        assert {"deepspeed.py", "zero.py", "zero_models.py"} <= _files(divided[name], "engine"), name

    found = _planned("base", "trajectories", engine="deepspeed", scale="laptop", model="smollm2-135m", seeds=(0,))
    assert found["base@0"].settings["engine"] is None  # It is only copied.


def test_who_opens_an_index_gets_the_backend_and_its_parts() -> None:
    found = _planned(retriever="hybrid", seeds=(0,))
    for name in ("index", "recall", "augment", "base@0", "train@search_r1_ppo-0", "evaluate@base-0"):
        assert {"hybrid.py", "bm25.py", "dense.py"} <= _files(found[name], "retrieval"), name
    assert not {"hybrid.py", "bm25.py"} & _files(found["retrievers"], "retrieval")
    elastic = _planned("recall", retriever="elasticsearch")["recall"]
    assert {"elasticsearch.py", "elastic_load.py", "elastic_settings.py"} <= _files(elastic, "retrieval")
    assert "bm25.py" not in _files(elastic, "retrieval")


def test_order_is_kept_where_it_is_part_of_the_result() -> None:
    found = _planned("retrievers", compare_retrievers=("hybrid", "bm25"))["retrievers"]
    assert list(found.settings["retrievers"]) == ["hybrid", "bm25"]


def test_the_report_knows_which_questions_were_played_during_training() -> None:
    assert stages()["report"].settings(RunSettings(ROOT, shipped.settings())).validation_split == "dev"


SMALL = {"scale": "small", "model": "smollm2-135m", "seeds": (0,)}


def test_a_scale_teaches_a_pretrained_model_and_another_takes_it_as_it_comes() -> None:
    systems = ("as_it_comes", "base", "search_r1_grpo")
    found = _planned("base", "train", "evaluate", systems=systems, **SMALL)
    taught = found["base@0"].settings
    assert taught["made"] is None
    assert taught["format"]["prompt"] == found["train@search_r1_grpo-0"].settings["learning"]["method"]["prompt"]
    assert found["train@as_it_comes-0"].settings["given"] == taught["pretrained"]["folder"]
    assert found["train@base-0"].settings["given"] is None
    assert "base/taught.py" in {path.removeprefix("tasks/") for path in found["base@0"].files}
    assert _planned("base", **SMALL | {"scale": "laptop"})["base@0"].settings["format"] is None


def test_a_tiny_policy_does_not_come_from_anywhere() -> None:
    with pytest.raises(
        ValueError, match=r"conf/system/as_it_comes\.yaml: weights='given': model 'tiny' begins with ran"
    ):
        _planned("train", systems=("base", "as_it_comes"))


@pytest.mark.parametrize(("asked", "played"), [(0, 600), (50, 50)])
def test_a_scale_plays_a_sample_unless_another_number_is_asked_for(asked: int, played: int) -> None:
    evaluate = replace(shipped.settings().evaluate, max_questions=asked)
    found = _planned("evaluate", systems=("base",), evaluate=evaluate, **SMALL)["evaluate@base-0"].settings
    assert (found["max_questions"], found["sampled"]) == (played, False)
    laptop = _planned("evaluate", systems=("base",), evaluate=evaluate, seeds=(0,))["evaluate@base-0"].settings
    assert (laptop["max_questions"], laptop["sampled"]) == (asked, True)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_scale_switches_off_stays_off_whatever_data_is_read(tmp_path: Path, is_whole: bool) -> None:
    """`format: null` is the advice where memory is short; the world changes numbers of that section."""
    for name in ("conf", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "conf/scale/small.yaml"
    tree = conf.read_yaml(file)
    if is_whole:
        tree["format"] = None
    else:
        tree["format"]["read"] = None
    file.write_text(json.dumps(tree))
    run = RunSettings(tmp_path, replace(shipped.settings(), data="world", **SMALL))
    assert run.teaches_format == (tree["format"] is not None)
    if run.teaches_format:
        assert run.scale(FormatConf, "format").read is None


def test_a_file_of_data_changes_the_scale_for_its_own_questions(tmp_path: Path) -> None:
    chosen = replace(shipped.settings(), data="world", **SMALL)
    world, folder = (RunSettings(ROOT, replace(chosen, data=name)) for name in ("world", "folder"))
    changes = conf.section("data", "world", ROOT)["scales"]["small"]["train"]
    assert (folder.training().questions, changes["questions"]) == ("found", "all")
    assert world.training() == replace(folder.training(), **changes)
    assert world.scale(FormatConf, "format").fit.max_steps < folder.scale(FormatConf, "format").fit.max_steps
    assert RunSettings(ROOT, replace(chosen, scale="smoke", model="tiny")).training().questions == "all"

    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    file = tmp_path / "conf/data/world.yaml"
    both = "conf/data/world.yaml over conf/scale/small.yaml: train"
    for added, read, message in (
        ("train: {num_step: 3}", RunSettings.training, f"{both}: unknown key 'num_step'"),
        ("train: 3", RunSettings.training, f"{both}=3: expected a section of settings"),
        ("training: {num_steps: 3}", attrgetter("data"), "conf/data/world.yaml: unknown key 'training'"),
    ):
        file.write_text(f"extends: smoke\nscales: {{small: {{{added}}}}}\n")
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            read(RunSettings(tmp_path, chosen))


def test_a_file_of_a_generator_changes_the_training_that_it_plays_for(tmp_path: Path) -> None:
    chosen = replace(shipped.settings(), generator="fleet")
    fleet, ahead = (RunSettings(ROOT, replace(chosen, generator=name)) for name in ("fleet", "fleet_ahead"))
    assert ahead.training() == replace(fleet.training(), play_ahead=True)
    assert ahead.training({"num_steps": 3}, "a method") == replace(fleet.training(), play_ahead=True, num_steps=3)
    assert ahead.generator() == fleet.generator()

    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    where = "conf/generator/fleet.yaml: train over conf/scale/laptop.yaml: train"
    for section, message in (
        ("{play_aheat: true}", f"{where}: unknown key 'play_aheat'"),
        ("3", "conf/generator/fleet.yaml: train=3: expected settings."),
    ):
        (tmp_path / "conf/generator/fleet.yaml").write_text(f"kind: fleet\ntrain: {section}\n")
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            RunSettings(tmp_path, chosen).training()


def test_plans_of_the_frame_and_of_planning_are_nobodys() -> None:
    for made in _planned(seeds=(0,)).values():
        assert not [path for path in made.files if path.startswith(("tasks/runner", "tasks/plan", "tasks/params/"))]


def test_what_is_installed_in_another_version_than_pinned_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunSettings(ROOT, shipped.settings())
    plan.write(tmp_path / "plan", run, {})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(identity, "installed", lambda: {"torch": "1.0"})
    plan.write(tmp_path / "plan", run, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert f"torch {libraries.pins(ROOT)['torch']} (installed: 1.0). Results may differ" in line


def test_a_wrong_setting_of_the_last_stage_leaves_no_plan(tmp_path: Path) -> None:
    chosen: Params = replace(shipped.settings(), systems=("base", "nobody"))
    with pytest.raises(ValueError, match="unknown system 'nobody'"):
        plan.write(tmp_path / "plan", RunSettings(ROOT, chosen), stages())
    assert not (tmp_path / "plan").exists()


def test_another_pin_changes_every_plan(tmp_path: Path) -> None:
    for name in ("conf", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    run = RunSettings(tmp_path, shipped.settings())
    before = dict(plan.plans(run, stages(), SOURCES))
    (tmp_path / "requirements").unlink()
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/run.txt").write_text("numpy==0.0.1\n")
    after = dict(plan.plans(run, stages(), SOURCES))
    assert all(dataclasses.replace(before[name], libraries=after[name].libraries) == after[name] for name in before)
    assert not {made.libraries for made in before.values()} & {made.libraries for made in after.values()}


def _clone(root: Path, model: str) -> RunSettings:
    """The house with a model of its own, called `mine`, at laptop scale."""
    for name in ("requirements", "conf"):
        shutil.copytree(ROOT / name, root / name)
    (root / "conf/model/mine.yaml").write_text(model)
    return RunSettings(root, replace(shipped.settings(), model="mine", systems=("base", "dspo"), seeds=(0,)))


@pytest.mark.parametrize(
    ("folder", "fetch"),
    [
        ("Qwen/Qwen2.5-0.5B", "HF_HUB_OFFLINE=0 hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B`"),
        ("models/Mine-1B", "HF_HUB_OFFLINE=0 hf download <organisation>/Mine-1B --local-dir models/Mine-1B`"),
    ],
)
def test_a_model_folder_that_is_missing_ends_the_plan(tmp_path: Path, folder: str, fetch: str) -> None:
    run = _clone(
        tmp_path,
        f"kind: pretrained\nprompt: tiny\npretrained: {{folder: {folder}}}\nlora: {{rank: 0}}\n"
        "rollout: {max_total_tokens: 512}\n",
    )
    with pytest.raises(ValueError, match=r"^conf/model/mine\.yaml: pretrained: folder=.* no such folder") as caught:
        plan.write(tmp_path / "plan", run, stages())
    assert fetch in str(caught.value)
    assert not (tmp_path / "plan").exists()
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, tmp_path / folder)
    assert "base@0" in plan.write(tmp_path / "plan", run, stages())


READER = (ROOT / "conf/service/llama_reader.yaml").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "chosen", "place", "folder"),
    [
        ("retriever/dense", "minilm ", "intfloat/e5-base-v2 ", {"retriever": "dense"}, "encoder", "models/e5-base-v2"),
        ("retriever/dense", "minilm ", "models/e5 ", {"compare_retrievers": ("dense",)}, "encoder", "models/e5"),
        (
            "retriever/hybrid",
            "encoder: minilm",
            "encoder: here",
            {"retriever": "hybrid"},
            "parts: dense: encoder",
            "here",
        ),
        ("retriever/hybrid", 'model: ""', "model: a/b", {"retriever": "hybrid"}, "reranker: model", "models/b"),
        (
            "retriever/elasticsearch_hybrid",
            "minilm ",
            "a/b ",
            {"retriever": "elasticsearch_hybrid"},
            "encoder",
            "models/b",
        ),
        (
            "service/tiny_reader",
            None,
            READER,
            {"systems": ("base", "r_search")},
            "folder",
            "models/Llama-3.2-3B-Instruct",
        ),
        ("service/rule_judge", None, READER, {"systems": ("base", "slate")}, "folder", "models/Llama-3.2-3B-Instruct"),
        ("reward_model/pica", "backbone: null", "backbone: a/b", {"systems": ("base", "pica")}, "backbone", "models/b"),
    ],
)
def test_every_other_model_folder_that_is_missing_ends_the_plan(
    tmp_path: Path, file: str, old: str | None, new: str, chosen: dict[str, Any], place: str, folder: str
) -> None:
    plain = _clone(tmp_path, "").params
    path = tmp_path / f"conf/{file}.yaml"
    text = path.read_text()
    assert old is None or old in text
    path.write_text(new if old is None else text.replace(old, new))
    run = RunSettings(tmp_path, params.with_models(replace(plain, model="tiny", **chosen), tmp_path))
    with pytest.raises(ValueError) as caught:
        plan.write(tmp_path / "plan", run, stages())
    assert str(caught.value).startswith(f"conf/{file}.yaml: {place}=")
    assert re.search(rf"`HF_HUB_OFFLINE=0 hf download \S+ --local-dir {folder}`", str(caught.value))
    assert not (tmp_path / "plan").exists()


def test_a_model_lays_the_budgets_it_needs_over_all_others(tmp_path: Path) -> None:
    text = "kind: pretrained\nprompt: null\npretrained: {folder: here}\nlora: {rank: 0}\n"
    run = _clone(tmp_path, f"{text}rollout: {{max_prompt_tokens: 700, max_total_tokens: 1500}}\n")
    other = RunSettings(ROOT, replace(run.params, model="tiny"))
    for name, where in (("train@dspo-0", ("learning", "rollout")), ("train@base-0", ("described", "rollout"))):
        found, plain = (dict(plan.plans(one, {"train": stages()["train"]}))[name].settings for one in (run, other))
        for key in where:
            found, plain = found[key], plain[key]
        assert found == plain | {"max_prompt_tokens": 700, "max_total_tokens": 1500}
    (tmp_path / "conf/model/mine.yaml").write_text(f"{text}rollout: {{max_prompt_token: 700}}\n")
    with pytest.raises(ValueError, match=r"conf/model/mine\.yaml: rollout over .*: unknown key 'max_prompt_token'"):
        RunSettings(tmp_path, run.params).rollout()


@pytest.mark.parametrize(
    ("method", "file", "text", "wanted"),
    [
        ("pica", "service/pica", "kind: reward_model\nmodel: pica_as_released\nhead: success\n", "hazard"),
        ("pica_as_released", "reward_model/pica_as_released", "extends: pica\n", "success"),
    ],
)
def test_a_service_says_of_its_model_what_that_models_file_says(
    tmp_path: Path, method: str, file: str, text: str, wanted: str
) -> None:
    """A model of the other head would reward what is wrong, to the end of the run."""
    run = _clone(tmp_path, "kind: tiny\n")
    chosen = replace(run.params, model="tiny", systems=("base", method))
    train = {"train": stages()["train"]}
    assert dict(plan.plans(RunSettings(tmp_path, params.with_models(chosen, tmp_path)), train, SOURCES))
    (tmp_path / f"conf/{file}.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        list(plan.plans(RunSettings(tmp_path, params.with_models(chosen, tmp_path)), train, SOURCES))
    assert str(caught.value).startswith(f"conf/method/{method}.yaml: services: reward_model: head=")
    assert f"expected {wanted!r}, the loss.head of conf/reward_model/pica_as_released.yaml." in str(caught.value)


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("5", "title: found 5 (int), expected text."),
        ("[a]", "title: found ['a'] (list), expected text."),
        ("null", "title: found None (NoneType), expected text."),
        ("''", "title: found '', expected one line of printable text without blanks around it."),
        ("' a'", "title: found ' a', expected one line of printable text"),
        ('"two\\nlines"', "title: found 'two\\nlines', expected one line of printable text"),
        ("base", "title='base': system 'base' has the same, expected another one for each system of a run"),
        ("DSPO", "title='DSPO': system 'dspo' has the same, expected another one for each system of a run"),
    ],
)
def test_a_title_is_one_line_and_no_other_systems(tmp_path: Path, title: str, message: str) -> None:
    run = _clone(tmp_path, "kind: tiny\n")
    (tmp_path / "conf/system/other.yaml").write_text(f"kind: policy\nmethod: dspo\ntitle: {title}\n")
    params_ = replace(run.params, model="tiny", systems=("base", "dspo", "other"))
    with pytest.raises(ValueError) as caught:
        list(plan.plans(RunSettings(tmp_path, params_), {"report": stages()["report"]}, SOURCES))
    assert str(caught.value).startswith(f"conf/system/other.yaml: {message}")
    assert "\n" not in str(caught.value)


def test_the_settings_of_a_system_hold_those_of_its_services() -> None:
    """Else a change of a service would not play its systems again."""
    run = RunSettings(ROOT, shipped.settings())
    made = systems.build(run.system("base"), "base")
    named = replace(made, services={"documents": services.load("documents", "world", ROOT)})
    assert named.settings == {**made.settings, "services": {"documents": run.service("documents", "world")}}
    assert systems.build(named.settings, "named") == named


def test_what_reaches_a_server_is_no_part_of_a_plan_and_all_else_is(tmp_path: Path) -> None:
    chat = dict.fromkeys(("model", "request", "recorded", "replayed_sha256", *REACHED_BY), 0)
    assert chat.keys() == {field.name for field in dataclasses.fields(Endpoint)}
    made = Plan({"seed": 0, "services": {"judge": {"kind": "chat_judge", "chat": chat}}, "rows": [1]}, {}, "")
    planned.write(tmp_path / planned.FOLDER, "train@a-0", made)
    written = json.loads((tmp_path / planned.FOLDER / "train/a-0.json").read_text())["settings"]
    assert written["services"]["judge"]["chat"].keys() == {"model", "request", "recorded", "replayed_sha256"}
    assert planned.read(tmp_path, "train@a-0") == made

    path = tmp_path / planned.FOLDER / "train/a-0.servers.json"
    path.write_text('{"services.reader.chat": {"retries": 1}}')
    with pytest.raises(ValueError, match=r"a-0\.servers\.json: services\.reader\.chat: .* has no such settings"):
        planned.read(tmp_path, "train@a-0")


def test_a_bonus_counts_down_to_the_last_step_of_the_game() -> None:
    run = RunSettings(ROOT, replace(shipped.settings(), systems=("base", "slate")))
    method = run.method("slate")
    rewards = tuple({**reward, "budget": 4} for reward in method["rewards"])
    with pytest.raises(
        ValueError, match=r"x\.yaml: rewards: judged_actions: budget=4: expected 5, the scale's max_turns"
    ):
        _check_budgets({"rewards": rewards}, run.rollout(method["rollout"]), "x.yaml")
