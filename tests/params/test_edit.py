"""How answers get into `params.yaml`: all or none, checked, comments kept."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows import reproduce
from tasks import conf, params
from tasks.base.settings import ModelConf, PretrainedConf
from tasks.methods import loader
from tasks.model_source import Source
from tasks.params import edit
from tasks.params.form import form_of
from tests import shipped
from tests.pipeline.toy import PARAMS_YAML

HOUSE = shipped.root()


def test_answers_are_written_and_comments_stay(root: Path) -> None:
    changes = edit.apply(edit.parse(["evaluate.top_k=5", "seeds=[0, 7]", "systems=[a, b]"]), root)
    assert changes == ["evaluate.top_k: 3 -> 5", "seeds: [0] -> [0, 7]"]
    assert params.read(root).evaluate.top_k == 5
    assert params.read(root).seeds == (0, 7)
    text = (root / "params.yaml").read_text()
    expected = PARAMS_YAML.replace("top_k: 3 ", "top_k: 5 ").replace("seeds: [0]", "seeds: [0, 7]")
    assert text == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["evaluate.topk=5"],
            "evaluate.topk: there is no such setting. Did you mean evaluate.top_k? Known: scale, data, ",
        ),
        (["evaluate.topk=5"], "Did you mean evaluate.top_k?"),
        (["evaluate.top_k.x=5"], "there is no such setting"),
        (["evaluate=5"], "there is no such setting"),
        (["METHOD=stepsearch"], "Did you mean METHODS?"),
        (["SEED=0"], "Did you mean SEEDS?"),
        (["SEDES=5"], "SEDES: there is no such setting. Did you mean SEEDS? Known: SCALE, DATA, "),
        (["SEDES=5"], "Did you mean SEEDS?"),
        (["DATA=nowhere"], "DATA=nowhere: neither a folder nor a name of conf/data/"),
        (["METHODS=a,grop"], "unknown system 'grop'. Known: a, b, c, plain."),
        (["SYSTEMS=b,c"], "evaluate.reference='a': expected one of systems=['b', 'c']"),
        (["REFERENCE=c"], "evaluate.reference='c': expected one of systems=['a', 'b']"),
        (["METHODS=[a"], "the value is not YAML"),
        (["TOP_K=1,2"], "top_k: found '1,2' (str), expected an integer"),
        (["evaluate.top_k=-1"], "evaluate: top_k=-1: expected 0 or more and 1000 or less (passages per"),
        (["evaluate.top_k=five"], "found 'five' (str), expected an integer"),
        (["systems=[a, plian]"], "unknown system 'plian'. Did you mean 'plain'?"),
        (["retriever=bm52"], "unknown retriever 'bm52'. Did you mean 'bm25'?"),
        (["seeds=[]"], "seeds=[]: expected at least 1 in it"),
        (["evaluate.top_k=7", "seeds=[1, 1]"], "expected different integers"),
        (["seeds"], "expected key=value"),
        (["seeds=[0"], "the value is not YAML"),
        (["METHODS=a,,b"], "--set METHODS=a,,b: part 2 of 3 is empty, expected a value between commas."),
        (["METHODS=a,"], "part 2 of 2 is empty"),
        (["SEEDS=,0"], "part 1 of 2 is empty"),
        (["METHODS=b", "SYSTEMS=a"], "METHODS beside SYSTEMS: both write `systems` of params.yaml. Give one of them"),
        (["systems=[a]", "METHODS=b"], "METHODS beside systems: both write"),
    ],
)
def test_wrong_answers_change_nothing(root: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        edit.apply(edit.parse(words, root), root)
    assert message in str(caught.value)
    assert (root / "params.yaml").read_text() == PARAMS_YAML
    assert [path.name for path in root.iterdir() if path.is_file()] == ["params.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scale: small", "scal: small", "params.yaml: unknown key 'scal'. Did you mean 'scale'"),
        ("scale: small", "scale: small\nfoo: 1", "params.yaml: unknown key 'foo'"),
        ("systems: [a, b]", "systems: [a, grop]", "params.yaml: unknown system 'grop'"),
        ("seeds: [0]", "seeds: 0", "params.yaml: seeds: found 0, expected a list"),
        ("seeds: [0]", "seeds: [0, -1]", "seeds[1]=-1: expected 0 or more"),
        ("seeds: [0]", "seeds: [0", "not valid YAML"),
        (PARAMS_YAML, "", "expected a mapping of settings"),
    ],
)
def test_what_was_written_by_hand_is_checked_before_anything_runs(
    root: Path, old: str, new: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PARAMS_YAML.replace(old, new)
    assert text != PARAMS_YAML
    (root / "params.yaml").write_text(text)
    monkeypatch.chdir(root)
    assert reproduce.main(["--no-prefect"]) == 1
    printed = capfd.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert (root / "params.yaml").read_text() == text


def test_a_clone_without_settings(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "params.yaml").unlink()
    monkeypatch.chdir(root)
    assert reproduce.main(["--no-prefect"]) == 1
    assert "params.yaml: the file is missing" in capfd.readouterr().err


def test_every_setting_has_a_variable_of_the_makefile(root: Path) -> None:
    words = ["SEEDS=0,7", "METHODS=b", "TOP_K=5", "DATA=world", "MAX_FAILED_SHARE=1e-2", "COMPARE_RETRIEVERS=[dense]"]
    assert edit.parse(words, root) == {
        "seeds": [0, 7],
        "systems": ["a", "b"],
        "evaluate.top_k": 5,
        "data": "world",
        "data_folder": "conf/data/none.txt",
        "evaluate.max_failed_share": 0.01,
        "compare_retrievers": ["dense"],
    }
    edit.apply(edit.parse(words, root), root)
    assert params.read(root).compare_retrievers == ("dense",)  # A key that the file did not have.
    assert len(edit.VARIABLES) == len(edit.SETTINGS)


@pytest.mark.parametrize("order", [1, -1])
def test_methods_of_a_model_that_is_taught_stand_beside_the_model_as_it_comes(order: int) -> None:
    words = ["METHODS=dspo", "MODEL=smollm2-135m", "SCALE=small"][::order]
    assert edit.parse(words, HOUSE)["systems"] == ["as_it_comes", "base", "dspo"]
    named = [word.replace("METHODS=", "METHODS=as_it_comes,") for word in words]
    assert edit.parse(named, HOUSE)["systems"] == ["as_it_comes", "base", "dspo"]
    for other in (["METHODS=dspo"], ["METHODS=dspo", "MODEL=smollm2-135m"], ["METHODS=dspo", "SCALE=small"]):
        assert edit.parse(other, HOUSE)["systems"] == ["base", "dspo"]
    assert "systems" not in edit.parse(["MODEL=smollm2-135m", "SCALE=small"], HOUSE)


def test_another_model_or_scale_takes_the_model_as_it_comes_off_the_list(tmp_path: Path) -> None:
    shutil.copytree(HOUSE / "conf", tmp_path / "conf")
    shutil.copyfile(shipped.root() / "params.yaml", tmp_path / "params.yaml")
    edit.apply(edit.parse(["METHODS=dspo", "MODEL=smollm2-135m", "SCALE=small"], tmp_path), tmp_path)
    (tmp_path / "conf/data/untaught.yaml").write_text("extends: world\nscales: {small: {format: null}}\n")
    for words in (["MODEL=tiny"], ["SCALE=laptop"], ["MODEL=tiny", "SCALE=laptop"], ["DATA=untaught"]):
        assert edit.parse(words, tmp_path)["systems"] == ["base", "dspo"]
    assert "systems" not in edit.parse(["SEEDS=1"], tmp_path)
    for words in (["MODEL=smollm2-135m"], ["DATA=world"]):
        assert "systems" not in edit.parse(words, tmp_path)


def test_the_comments_of_params_are_the_descriptions() -> None:
    """One description serves the file, the form and the command line."""
    lines = (HOUSE / conf.PARAMS).read_text(encoding="utf-8").splitlines()
    comments = {line.split(":")[0].strip(): line.partition("#")[2].strip() for line in lines if ":" in line}
    described = {key.rpartition(".")[2]: setting.info.description for key, setting in edit.SETTINGS.items()}
    assert {key: comments[key] for key in described} == described


def test_the_command_line_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["--help"])
    printed = capsys.readouterr().out
    for variable, key in edit.VARIABLES.items():
        assert f"{key} ({variable}): {edit.SETTINGS[key].info.description}" in printed
    assert all(f"({variable})" in printed for variable in ("DATA", "METHODS"))


def test_data_is_a_name_or_a_folder(root: Path) -> None:
    assert edit.data_answers("world", root) == {"data": "world", "data_folder": "conf/data/none.txt"}
    (root / "mine").mkdir()
    assert edit.data_answers("mine", root) == {"data": "folder", "data_folder": "mine"}
    (root / "conf/data/folder.yaml").write_text("kind: folder\n")
    (root / "conf/data/resplit.yaml").write_text("extends: folder\n")
    assert edit.data_answers("folder", root) == {"data": "folder"}
    words = ["DATA=resplit", "DATA_FOLDER=mine"]
    for order in (words, words[::-1]):
        assert edit.parse(order, root) == {"data": "resplit", "data_folder": "mine"}
    (root / "conf/data/folder.yaml").unlink()
    (root / "conf/data/resplit.yaml").unlink()
    with pytest.raises(ValueError, match="DATA=nowhere: neither a folder nor a name of conf/data/ \\(world\\)"):
        edit.data_answers("nowhere", root)


def test_settings_of_runs_that_failed_are_not_those_of_the_next(tmp_path: Path) -> None:
    """The file that ships: data of a folder without naming one, then a search engine that is not there."""
    (tmp_path / "conf").symlink_to(HOUSE / "conf")
    before = (HOUSE / conf.PARAMS).read_bytes()
    (tmp_path / conf.PARAMS).write_bytes(before)
    seen = []

    def fail(changes: list[str]) -> None:
        seen.append((changes, params.read(tmp_path) != shipped.settings()))
        raise KeyError

    for word in ("DATA=folder", "RETRIEVER=elasticsearch"):
        with pytest.raises(KeyError), edit.applied(edit.parse([word], tmp_path), tmp_path) as changes:
            fail(changes)
        assert (tmp_path / conf.PARAMS).read_bytes() == before
    assert seen == [(["data: world -> folder"], True), (["retriever: bm25 -> elasticsearch"], True)]


def test_a_folder_of_the_form_is_checked_like_that_of_the_command_line(root: Path) -> None:
    with pytest.raises(ValueError, match=r"data_folder=/nope: neither a folder nor a name of conf/data/ \(world\)"):
        edit.apply({"data_folder": "/nope"}, root)
    assert (root / "params.yaml").read_text() == PARAMS_YAML


def test_there_and_back_leaves_the_file_as_it_was(root: Path) -> None:
    text = PARAMS_YAML.replace("data_folder: conf/data\n", "data_folder: conf/data  # of data: folder\n")
    (root / "params.yaml").write_text(text)
    long = "a folder whose name is longer than the columns before any comment of the file"
    (root / long).mkdir()
    edit.apply({"data_folder": long, "scale": "large", "seeds": [0, 1, 2, 3]}, root)
    changed = (root / "params.yaml").read_text()
    assert f"data_folder: {long}  # of data: folder" in changed
    edit.apply({"data_folder": "conf/data", "scale": "small", "seeds": [0]}, root)
    assert (root / "params.yaml").read_text() == text


@pytest.mark.parametrize(
    ("name", "found", "short", "expected"),
    [
        (
            "Qwen/Qwen2.5-0.5B-Instruct",
            "a name of the Hugging Face hub",
            "qwen2.5-0.5b-instruct",
            PretrainedConf("models/Qwen2.5-0.5B-Instruct", Source(hub="Qwen/Qwen2.5-0.5B-Instruct", revision="main")),
        ),
        ("down/My.gguf", "a GGUF file", "my", PretrainedConf("models/My", Source(gguf="down/My.gguf"))),
        ("models/Mine", "a folder", "mine", PretrainedConf("models/Mine")),
    ],
)
def test_a_model_is_told_how_to_become_a_file_of_conf(
    root: Path, name: str, found: str, short: str, expected: PretrainedConf
) -> None:
    (root / "models/Mine").mkdir(parents=True)
    with pytest.raises(ValueError) as caught:
        edit.apply(edit.parse([f"MODEL={name}"], root), root)
    for part in (f"params.yaml: model={name!r}: found {found}", f"conf/model/{short}.yaml and run with MODEL={short}."):
        assert part in str(caught.value)
    (written,) = re.findall(r"`(\{.*\})`", str(caught.value))
    tree = conf.parse(written, "x")
    scales = tree.pop("scales")
    assert conf.fill(ModelConf, tree, "x").pretrained == expected
    small = conf.fill(ModelConf, conf.merge(tree, scales["small"]), "x")
    assert (small.prompt, small.grammar) == ("short", {"kind": "search_r1"})


def compare_file(root: Path, text: str) -> None:
    (root / "conf" / "compare").mkdir()
    (root / "conf" / "compare" / "main.yaml").write_text(text, encoding="utf-8")


def test_a_comparison_sets_methods_and_seeds(root: Path) -> None:
    compare_file(root, "methods: [c, a]\nseeds: [0, 1, 2]\n")
    answers = edit.compare_answers("main", root)
    assert answers == {"systems": ["a", "c"], "seeds": [0, 1, 2]}
    assert edit.apply(answers, root) == ["systems: [a, b] -> [a, c]", "seeds: [0] -> [0, 1, 2]"]
    assert (params.read(root).systems, params.read(root).seeds) == (("a", "c"), (0, 1, 2))
    assert edit.apply(answers, root) == []  # `dvc repro report` has nothing left to be told.


def test_a_comparison_may_leave_out_the_sampled_play(root: Path) -> None:
    compare_file(root, "methods: [c]\nseeds: [0]\nsampled: false\n")
    edit.apply(edit.compare_answers("main", root), root)
    assert params.read(root).evaluate.sampled is False


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mian", "methods: [a]\nseeds: [0]\n", "--compare: unknown compare 'mian'. Did you mean 'main'? Known: main."),
        ("main", "method: [a]\nseeds: [0]\n", "conf/compare/main.yaml: unknown key 'method'. Did you mean 'methods'?"),
        ("main", "methods: [a]\n", "conf/compare/main.yaml: key 'seeds' is missing"),
        ("main", "methods: [a]\nseeds: []\n", "conf/compare/main.yaml: seeds=[]: expected at least 1 in it"),
        ("main", "methods: [a]\nseeds: [-1]\n", "conf/compare/main.yaml: seeds[0]=-1: expected 0 or more"),
        ("main", "methods: []\nseeds: [0]\n", "conf/compare/main.yaml: methods=[]: expected at least 1 in it"),
        ("main", "methods: [../compare/main]\nseeds: [0]\n", "conf/compare/main.yaml: unknown method '../compare"),
        ("main", "methods: [a, grop]\nseeds: [0]\n", "conf/compare/main.yaml: unknown method 'grop'"),
        ("main", "methods: [b, b]\nseeds: [0]\n", "systems=('a', 'b', 'b'): expected different names"),
        ("main", "methods: []\nseeds: [0]\n", "main.yaml: methods=[]: expected at least 1 in it"),
        ("main", "methods: [a]\nseeds: [zero]\n", "conf/compare/main.yaml: seeds[0]: found 'zero' (str)"),
    ],
)
def test_a_wrong_comparison_changes_nothing(
    root: Path, name: str, text: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_file(root, text)
    monkeypatch.chdir(root)
    assert reproduce.main(["--no-prefect", "--compare", name]) == 1
    printed = capfd.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert (root / "params.yaml").read_text() == PARAMS_YAML


def _pays_outcomes(method: dict[str, Any]) -> bool:
    """Whether a method is of the outcome-reward family: it draws whole plays, and no model judges them."""
    draws_whole_plays = method["sampler"]["kind"] in ("independent_group", "gold_answers")
    return draws_whole_plays and not {"chat", "turn_scores", "reward_model", "reader"} & method["services"].keys()


def test_the_comparisons_of_this_repository_name_methods_it_has() -> None:
    for name, seeds in (("main", [0, 1, 2]), ("family", [0]), ("learned", [0, 1, 2])):
        assert edit.compare_answers(name, HOUSE)["seeds"] == seeds
    named = {name: loader.load(name, "laptop", HOUSE) for name in shipped.names("method")}
    learned = set(edit.compare_answers("learned", HOUSE)["systems"])  # And what they are compared with.
    every = {name for name, method in named.items() if _pays_outcomes(method)} - learned
    assert edit.compare_answers("family", HOUSE)["systems"][0] == "base"
    assert set(edit.compare_answers("family", HOUSE)["systems"]) == every | {"base"}


def test_the_form_shows_what_is_set_and_refuses_what_it_does_not_know(root: Path) -> None:
    form = form_of(root)
    shown = form()
    assert shown.answers()["evaluate.top_k"] == 3
    assert shown.answers().keys() == edit.SETTINGS.keys() - {"reward_models", "readers", "starts", "tools"}
    assert edit.apply(shown.answers(), root) == []
    chosen = form.model_validate({"seeds": [1], "evaluate": {"top_k": 4}, "rare": {"compare_retrievers": ["dense"]}})
    changes = ["seeds: [0] -> [1]", "compare_retrievers: [] -> [dense]", "evaluate.top_k: 3 -> 4"]
    assert sorted(edit.apply(chosen.answers(), root)) == sorted(changes)

    for wrong, words in (
        ({"retreiver": "bm25"}, "retreiver"),
        ({"retriever": "bm52"}, "'bm25' or 'dense'"),
        ({"evaluate": {"top_k": -1}}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValidationError, match=words):
            form.model_validate(wrong)


def test_the_form_has_the_choices_of_now(root: Path) -> None:
    assert "c" in str(form_of(root).model_json_schema()["properties"]["systems"])
    (root / "conf/method/new_one.yaml").write_text("name: x\n")
    properties = form_of(root).model_json_schema()["properties"]
    assert "new_one" in str(properties["systems"])
    assert all(field["description"].endswith(".") for field in properties.values())


BLOCK = PARAMS_YAML.replace("systems: [a, b]      # two systems", "systems:\n- a\n- b").replace(
    "seeds: [0]", "seeds:\n    - 0\n    - 3"
)


@pytest.mark.parametrize(
    ("text", "answers", "kept"),
    [
        (
            BLOCK,
            {"seeds": [0, 1], "systems": ["a", "c"]},
            "seeds: [0, 1]\nevaluate:\n",
        ),  # As `dvc exp run -S` writes it.
        (PARAMS_YAML.replace("[a, b]", "[a,\n  b]"), {"systems": ["a", "c"]}, "systems: [a, c]      # two systems"),
        (PARAMS_YAML.replace("scale: small", '"scale": small'), {"scale": "large"}, '"scale": large         # sizes'),
        (PARAMS_YAML.replace("scale: small", "scale : small"), {"scale": "large"}, "scale: large         # sizes"),
        (PARAMS_YAML.rstrip("\n"), {"compare_retrievers": ["dense"]}, "compare_retrievers: [dense]\nscale: small"),
        (PARAMS_YAML.replace("\n", "\r\n"), {"evaluate.top_k": 5}, "top_k: 5           # passages\r\n"),
        (PARAMS_YAML.replace("  reference: a", "  reference: 'a'  # 'quoted'"), {"evaluate.top_k": 5}, "# 'quoted'"),
        (
            PARAMS_YAML[: PARAMS_YAML.index("evaluate:")]
            + "evaluate: {top_k: 3, max_questions: 0, num_bootstrap: 100, sampled: false, reference: a}\n",
            {"evaluate.top_k": 5, "evaluate.max_failed_share": 0.5},
            "evaluate: {max_failed_share: 0.5, top_k: 5, max_questions: 0",
        ),
        (PARAMS_YAML.replace("seeds: [0]", "# seeds: [7]\nseeds: [0]"), {"seeds": [2]}, "# seeds: [7]\nseeds: [2]"),
    ],
)
def test_whatever_way_it_is_written(root: Path, text: str, answers: dict[str, Any], kept: str) -> None:
    path = root / "params.yaml"
    path.write_bytes(text.encode())
    with edit.applied(answers, root) as changes:
        assert len(changes) == len(answers)
        assert kept in path.read_bytes().decode()
        tree = conf.read_yaml(path)
        for key, value in answers.items():
            section, _, last = key.rpartition(".")
            assert (tree[section] if section else tree)[last] == value
    assert path.read_bytes() == text.encode()


def test_a_section_that_lacks_its_keys_is_named(root: Path) -> None:
    text = PARAMS_YAML[: PARAMS_YAML.index("evaluate:")] + "evaluate: {}\n"
    (root / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"params.yaml: evaluate: key 'max_questions' is missing"):
        edit.apply({"evaluate.top_k": 5}, root)
    assert (root / "params.yaml").read_text() == text


def test_a_name_that_cannot_be_printed_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(root)
    for name in ("bad\udcffbyte", "two\nlines", "\x1b[31mred"):
        assert reproduce.main(["--no-prefect", "--name", name]) == 1
        assert "expected one line of printable text" in capfd.readouterr().err
