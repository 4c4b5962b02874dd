"""Models that are trained for services: who needs which, how a folder is sealed, and what is said of another one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import params, plan, trained
from tasks.params import edit
from tasks.plan import RunSettings
from tasks.stages import tool
from tasks.store import DataError
from tests import shipped

ROOT = Path(__file__).parents[1]
FILES = {
    "conf/reward_model/small.yaml": "extends: pica\n",
    "conf/reader/eyes.yaml": "{}\n",
    "conf/service/small.yaml": "kind: reward_model\nmodel: small\n",
    "conf/service/eyes.yaml": "kind: reader\nmodel: eyes\nbatch: 8\n",
    "conf/service/elsewhere.yaml": "kind: reader\nurl: http://127.0.0.1:9\n",
    "conf/method/scored.yaml": "extends: search_r1_ppo\ntitle: Scored\nservices: {turn_scores: small}\n",
    "conf/method/both.yaml": "extends: scored\ntitle: Both\nservices: {reader: eyes}\n",
    "conf/method/neither.yaml": "extends: both\ntitle: None\nservices: {reader: elsewhere, turn_scores: null}\n",
    "conf/method/tool.yaml": "extends: r_search\ntitle: Tool\nscales: {laptop: {tool_reader: eyes}}\n",
    "conf/method/mute.yaml": "extends: search_r1_ppo\ntitle: Mute\ntool_reader: eyes\n",
    "conf/system/asks.yaml": "kind: asked\ntitle: Asks\nservices: {reader: eyes}\n",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Settings of the house, and some that name models which this pipeline would train."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copyfile(shipped.root() / "params.yaml", tmp_path / "params.yaml")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_models_follow_from_the_services_of_systems(clone: Path) -> None:
    assert params.models_of("base", "laptop", clone) == []
    assert params.models_of("scored", "laptop", clone) == [("reward_model", "small")]
    assert params.models_of("both", "laptop", clone) == [("reward_model", "small"), ("reader", "eyes")]
    assert params.models_of("neither", "laptop", clone) == []
    assert params.models_of("asks", "laptop", clone) == [("reader", "eyes")]
    found = params.models_of_all(["base", "asks", "both", "scored"], "laptop", clone)
    assert found == {"reward_models": ("small",), "readers": ("eyes",), "starts": (), "tools": ()}


def test_a_tool_needs_its_reader_and_a_policy_that_writes_evidence(clone: Path) -> None:
    found = params.models_of_all(["base", "tool", "mute"], "laptop", clone)
    assert found["tools"] == ("tool", "mute")
    assert found["readers"] == ("tiny_llama", "eyes")
    assert params.models_of_all(["tool"], "paper", clone)["tools"] == ()

    run = RunSettings(clone, params.with_models(replace(params.read(clone), systems=("base", "tool", "mute")), clone))
    chosen, models = run.tool_reader("tool")
    assert (chosen["kind"], models) == ("reader", ("eyes",))
    with pytest.raises(ValueError, match=r"mute\.yaml: tool_reader='eyes': grammar 'search_r1' writes no evidence"):
        run.tool_reader("mute")
    seeds = [tool.settings(run, "tool", seed).reader_seed for seed in run.params.seeds]
    assert (run.params.seeds, seeds) == ((0, 1), [1, 0]), "the reader that paid is another one"


def test_what_chooses_systems_fills_in_their_models_and_takes_them_out_again(clone: Path) -> None:
    before = (clone / "params.yaml").read_text()
    changes = edit.apply(edit.parse(["METHODS=both"], clone), clone)
    assert changes[1:] == ["reward_models: [] -> [small]", "readers: [] -> [eyes]"]
    chosen = params.read(clone)
    assert (chosen.reward_models, chosen.readers) == (("small",), ("eyes",))
    assert edit.apply(edit.parse(["METHODS=both"], clone), clone) == []
    edit.apply(edit.parse(["METHODS=search_r1_ppo,search_r1_grpo"], clone), clone)
    assert (clone / "params.yaml").read_text() == before


def test_a_plan_refuses_a_missing_and_an_unused_model(clone: Path) -> None:
    chosen = replace(params.read(clone), systems=("base", "scored"))
    for listed, needed in (((), "[small]"), (("small", "other"), "[small]")):
        with pytest.raises(ValueError) as caught:
            plan.write(clone / "plan", RunSettings(clone, replace(chosen, reward_models=listed)), {})
        assert str(caught.value).endswith(f"Write `reward_models: {needed}`.")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"params\.yaml: readers=\['eyes'\]: .* need \[\]\. Write `readers: \[\]`"):
        plan.write(clone / "plan", RunSettings(clone, replace(chosen, reward_models=("small",), readers=("eyes",))), {})
    run = RunSettings(clone, params.with_models(chosen, clone))
    run.check_models()
    assert run.users_of_models == {"small": ["scored"]}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("conf/service/small.yaml", "kind: reward_model\nmodel: smal\n", "conf/service/small.yaml: model: unknown rew"),
        ("conf/reader/small.yaml", "{}", "names conf/reward_model/small.yaml and conf/reader/small.yaml. Rename one"),
        ("conf/method/scored.yaml", "extends: search_r1_ppo\nservices: {turn_scores: nobody}", "scored.yaml: services"),
    ],
)
def test_a_wrong_name_of_a_model_is_one_line(clone: Path, file: str, text: str, message: str) -> None:
    (clone / file).write_text(text)
    with pytest.raises(ValueError) as caught:
        params.models_of("scored", "laptop", clone)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone with one trained model, `small` of seed 3."""
    folder = tmp_path / trained.FOLDER / "small-3"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts/weights").write_bytes(b"1234")
    trained.seal(folder, {"quality": 1})
    return tmp_path


def test_a_sealed_model_is_found_and_checked(root: Path) -> None:
    found = trained.find(root, ["small"], 3)
    assert set(trained.files_of(root / trained.FOLDER / "small-3")) == {"config.json", "parts/weights"}
    trained.write(root / "inputs", found)
    assert trained.read(root / "inputs") == found
    assert trained.read(root) == {}
    assert found["small"].checked(root) == root / "artifacts/models/small-3"
    with pytest.raises(DataError, match=r"artifacts/models/small-4/manifest\.json: the file is missing"):
        trained.find(root, ["small"], 4)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("parts/weights", b"1235", "artifacts/models/small-3/parts/weights: missing, or another file than manifest"),
        ("config.json", None, "artifacts/models/small-3/config.json: missing"),
        ("manifest.json", b"{}", "artifacts/models/small-3/manifest.json: found "),
        ("manifest.json", None, "artifacts/models/small-3/manifest.json: found no file, expected sha256"),
    ],
)
def test_another_model_is_refused(root: Path, file: str, content: bytes | None, message: str) -> None:
    found = trained.find(root, ["small"], 3)["small"]
    path = root / found.folder / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        found.checked(root)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
