"""What a person can get wrong: real stages end with code 1 and one line that says what and where, and write nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.data.rows import lines, passage, question
from tests.stages.clone import Clone

pytestmark = pytest.mark.slow

BASE, TRAIN = "base --seed 0", "train --system search_r1_grpo --seed 0"
DESCRIBE = "train --system base --seed 0"
EVALUATE = "evaluate --system base --seed 0"
PRETRAINED = "kind: pretrained\nprompt: tiny\npretrained: {folder: given}\nlora: {rank: 0}\n"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A copy whose first stages have run; not to be changed."""
    clone = Clone.make(tmp_path_factory.mktemp("ready") / "clone")
    clone.set("systems", "[base, search_r1_ppo, search_r1_grpo]")
    clone.must("data", "validate", "index", BASE, DESCRIBE)
    return clone


@pytest.fixture
def clone(ready: Clone, tmp_path: Path) -> Clone:
    """A copy of that copy, to spoil."""
    return ready.copy(tmp_path / "clone")


def _refused(clone: Clone, stage: str, *expected: str) -> None:
    before = _results(clone)
    done = clone.stage(stage)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    for text in expected:
        assert text in errors[0], errors[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert str(clone.root) not in errors[0]
    assert _results(clone) == before


def _results(clone: Clone) -> dict[str, bytes]:
    """Everything but plans, which may have been made anew."""
    plans = ("artifacts/plan/", *(f"artifacts/{name}/plan.json" for name in ("models", "quality", "tool")))
    return {name: content for name, content in clone.files().items() if not name.startswith(plans)}


@pytest.mark.parametrize(
    ("stage", "path", "old", "new", "expected"),
    [
        ("index", "params.yaml", "  top_k:", "  topk:", "params.yaml: evaluate: unknown key 'topk'. Did you mean 'top"),
        ("index", "params.yaml", "retriever:", "retreiver:", "params.yaml: unknown key 'retreiver'. Did you mean 'ret"),
        ("index", "params.yaml", "  top_k: 3", "  top_k: three", "params.yaml: evaluate: top_k: found 'three' (str),"),
        ("index", "params.yaml", "seeds: [0]", "seeds: []", "params.yaml: seeds=[]: expected at least 1 in it"),
        ("index", "params.yaml", "seeds: [0]", "seeds: [0", "params.yaml: not valid YAML"),
        ("index", "params.yaml", "model: tiny", "model: tinny", "unknown model 'tinny'. Did you mean 'tiny'?"),
        ("index", "params.yaml", "retriever: bm25", "retriever: bm52", "unknown retriever 'bm52'. Did you mean 'bm25'"),
        ("index", "params.yaml", "search_r1_ppo", "serch_r1_ppo", "unknown system 'serch_r1_ppo'. Did you mean 'searc"),
        ("index", "params.yaml", "scale: smoke", "scale: smok", "unknown scale 'smok'. Did you mean 'smoke'?"),
        ("index", "params.yaml", "data: smoke", "data: smokes", "unknown data 'smokes'. Did you mean 'smoke'?"),
        ("index", "conf/retriever/bm25.yaml", "k1:", "k2:", "conf/retriever/bm25.yaml: unknown key 'k2'"),
        ("index", "conf/retriever/bm25.yaml", "backend: bm25", "backend: bm", "backend='bm': expected one of bm25, de"),
        ("data", "conf/data/smoke.yaml", "distractors:", "distractor:", "smoke.yaml: world: unknown key 'distractor'."),
        ("data", "conf/data/smoke.yaml", "kind:", "knd:", "conf/data/smoke.yaml: unknown key 'knd'. Did you mean 'kin"),
        (BASE, "conf/model/tiny.yaml", "num_layers:", "layers:", "conf/model/tiny.yaml: tiny: unknown key 'layers'"),
        (BASE, "conf/scale/smoke.yaml", "base:", "bass:", "conf/scale/smoke.yaml: unknown key 'bass'. Known: base, fo"),
        (BASE, "conf/scale/smoke.yaml", "  max_questions:", "  max_question:", "smoke.yaml: base: unknown key 'max_qu"),
        (BASE, "conf/scale/smoke.yaml", "  max_turns:", "  turns:", "smoke.yaml: rollout: unknown key 'turns'"),
        (BASE, "conf/scale/smoke.yaml", "max_prompt_tokens: 256", "max_prompt_tokens: 5", "the budget max_prompt_toke"),
        (TRAIN, "conf/scale/smoke.yaml", "  num_steps:", "  num_step:", "smoke.yaml: train: unknown key 'num_step'. D"),
        (TRAIN, "conf/method/search_r1_grpo.yaml", "filter:", "filtre:", "r1_grpo.yaml: unknown key 'filtre'. D"),
        (TRAIN, "conf/method/search_r1_grpo.yaml", "kind: group", "kind: grop", "advantage: unknown kind 'grop'"),
        (TRAIN, "conf/method/search_r1_grpo.yaml", "prompt: search_r1", "prompt: search_r2", "unknown prompt 'sea"),
        (TRAIN, "conf/prompt/search_r1.yaml", "{question}", "", "conf/prompt/search_r1.yaml: user='Answer the given"),
        (DESCRIBE, "conf/system/base.yaml", "kind: policy", "kind: polcy", "base.yaml: unknown kind 'polcy': tasks/sy"),
        (DESCRIBE, "conf/system/base.yaml", "method: sear", "method: ser", "base.yaml: method: unknown method 'serch_"),
        (DESCRIBE, "conf/system/base.yaml", "method:", "metod:", "system/base.yaml: unknown key 'metod'. Known: prom"),
        (EVALUATE, "conf/system/base.yaml", "kind: policy", "", "conf/system/base.yaml: found"),
        (TRAIN, "conf/method/search_r1_grpo.yaml", "filter:", "train: {num_step: 3}\nfilter:", "grpo.yaml: train over"),
        (TRAIN, "conf/method/search_r1_grpo.yaml", "filter:", "rollout: {top_k: 0}\nfilter:", "grpo.yaml: rollout ov"),
    ],
)  # fmt: skip
def test_settings(clone: Clone, stage: str, path: str, old: str, new: str, expected: str) -> None:
    clone.change(path, old, new)
    _refused(clone, stage, expected)


def _spoilt(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        assert (folder / name).is_file()
        (folder / name).write_bytes(content)

    return spoil


def _another_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 11}))


def _without(*patterns: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        gone = [path for pattern in patterns for path in folder.glob(pattern)]
        assert gone
        for path in gone:
            path.unlink()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_without("tokenizer*", "vocab*", "merges*"), "given: no tokenizer found"),
        (_without("*.safetensors"), "given: no safetensors weights found"),
        (_without("config.json"), "given: no model configuration found"),
        (shutil.rmtree, "mine.yaml: pretrained: folder='given': there is no such folder. Put the model there"),
        (_spoilt("config.json", b"{"), "given/config.json: line 1: not JSON (Expecting property name"),
        (_spoilt("model.safetensors", b"12345678"), "given: transformers cannot load configuration and weights"),
        (_spoilt("tokenizer.json", b""), "given: transformers cannot load the tokenizer"),
        (_another_vocabulary, "given: transformers cannot load configuration and weights"),
    ],
    ids=["tokenizer", "weights", "configuration", "folder", "syntax", "torn", "empty", "vocabulary"],
)
def test_a_model_folder_that_is_not_whole(clone: Clone, spoil: Callable[[Path], None], expected: str) -> None:
    (clone.root / "conf/model/mine.yaml").write_text(PRETRAINED)
    clone.set("model", "mine")
    shutil.copytree(clone.root / "artifacts/base/0/policy", clone.root / "given")
    spoil(clone.root / "given")
    _refused(clone, BASE, expected)


def test_a_whole_model_folder_is_taken_over_as_it_is(clone: Clone) -> None:
    (clone.root / "conf/model/mine.yaml").write_text(PRETRAINED)
    clone.set("model", "mine")
    policy = clone.root / "artifacts/base/0/policy"
    shutil.copytree(policy, clone.root / "given")
    clone.must(BASE)
    assert (policy / "model.safetensors").read_bytes() == (clone.root / "given/model.safetensors").read_bytes()
    assert (policy / "tokenizer.json").read_bytes() == (clone.root / "given/tokenizer.json").read_bytes()
    assert (clone.root / "artifacts/base/0/metrics.jsonl").read_bytes() == b""


def test_a_model_folder_that_has_changed_since_the_plan_is_planned_anew(clone: Clone) -> None:
    """So neither a result nor the resume state of the old weights is taken for that of the new ones."""
    (clone.root / "conf/model/mine.yaml").write_text(PRETRAINED)
    clone.set("model", "mine")
    policy, given = clone.root / "artifacts/base/0/policy", clone.root / "given"
    shutil.copytree(policy, given)
    clone.must("plan")
    before = (clone.root / "artifacts/plan/base/0.json").read_bytes()
    weights = load_file(given / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, given / "model.safetensors", {"format": "pt"})
    _refused(clone, BASE, "given: found other files than when the run was planned. Plan anew: python -m flows.repro")

    clone.must("plan")
    assert (clone.root / "artifacts/plan/base/0.json").read_bytes() != before
    clone.must(BASE)
    assert load_file(policy / "model.safetensors")["model.norm.weight"].equal(weights["model.norm.weight"])


def test_an_evaluation_question_over_the_budget(clone: Clone) -> None:
    path = clone.root / "artifacts/data/questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = [row for row in rows if row["split"] == "test"][-1]
    last["question"] = "word " * 400 + "?"
    path.write_text(lines(rows))
    _refused(
        clone, EVALUATE, f"question {last['id']!r}: its prompt has ", "the budget max_prompt_tokens is 256", "Raise"
    )


def test_prompts_over_the_budget_of_a_given_model_are_found_before_teaching_and_before_training(clone: Clone) -> None:
    """The method's prompt takes 325 tokens of a policy with so few words: too many, or too many with most questions."""
    given = PRETRAINED.replace("prompt: tiny", "prompt: null")
    (clone.root / "conf/model/mine.yaml").write_text(given)
    clone.set("model", "mine")
    shutil.copytree(clone.root / "artifacts/base/0/policy", clone.root / "given")
    _refused(
        clone, BASE, "conf/system/base.yaml: prompt: a question of one word: its prompt has 325 tokens, the budget"
    )

    (clone.root / "conf/model/mine.yaml").write_text(f"{given}rollout: {{max_prompt_tokens: 328}}\n")
    clone.must(BASE, "augment", "inputs --system search_r1_grpo --seed 0")
    _refused(clone, TRAIN, "questions.jsonl, question 'world/", "the budget max_prompt_tokens is 328")


def test_a_prompt_of_a_system_over_the_budget_is_found_before_any_training(clone: Clone) -> None:
    (clone.root / "conf/system/base.yaml").write_text("kind: policy\nmethod: search_r1_ppo\nprompt: search_r1\n")
    _refused(
        clone, DESCRIBE, "conf/system/base.yaml: prompt: questions.jsonl, question ", "its prompt has ", "tokens is 256"
    )


def test_no_question_of_the_evaluated_splits(clone: Clone) -> None:
    path = clone.root / "artifacts/data/questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(lines([row for row in rows if row["split"] != "test"]))
    _refused(clone, EVALUATE, "conf/data/smoke.yaml: evaluate_splits=['test']", "no question of these")


@pytest.mark.parametrize(
    ("questions", "corpus", "expected"),
    [
        (lines([question(0), question(1)]), "", "given/corpus.jsonl: no passage in it, expected at least one"),
        (lines([question(0)]) + '{"id": \n', lines([passage(1)]), "given/questions.jsonl: row 2: column 8: not JSON"),
        (lines([question(0), question(1)]), lines([passage(1)]) + "[1]\n", "corpus.jsonl: row 2: found list, expected"),
        (lines([question(0), question(1, answers=[])]), lines([passage(1)]), "questions.jsonl: row 2: field 'answers'"),
        (lines([question(0), question(1, hopps=1)]), lines([passage(1)]), "row 2: unknown field 'hopps'. Did you mean"),
        (lines([question(0), question(1)]), lines([passage(2)]), "field 'gold_passage_ids': found 'p1', expected the"),
        (lines([question(0), question(1), question(0)]), lines([passage(1)]), "row 3: field 'id': found 'd/0' again,"),
    ],
    ids=["empty corpus", "broken row", "not an object", "no answer", "unknown field", "unknown gold", "twice"],
)  # fmt: skip
def test_a_folder_of_data_that_breaks_a_rule(clone: Clone, questions: str, corpus: str, expected: str) -> None:
    (clone.root / "given").mkdir()
    (clone.root / "given/questions.jsonl").write_text(questions)
    (clone.root / "given/corpus.jsonl").write_text(corpus)
    clone.set("data", "folder")
    clone.set("data_folder", "given")
    _refused(clone, "data", expected)


def test_an_index_of_another_corpus(clone: Clone) -> None:
    path = clone.root / "artifacts/data/corpus.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    _refused(clone, "recall", "artifacts/index: built from another corpus: artifacts/data/corpus.jsonl")


def test_a_stage_before_its_time(tmp_path: Path) -> None:
    clone = Clone.make(tmp_path / "clone")
    _refused(clone, "index", "artifacts/data/corpus.jsonl: the stage needs this and it is missing. Run `make run`,")
    _refused(clone, EVALUATE, "artifacts/train/base-0/system.json: the file is missing")


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        ("cluster/local", "workers: 64", "wrokers: 2", "cluster/local.yaml: hosts[0]: unknown key 'wrokers'. Did you"),
        ("cluster/local", "hosts:", "port: 80000\nhosts:", "conf/cluster/local.yaml: port"),
        ("cluster/local", "workers: 64", "workers: 1", "fleet.yaml: generators=2: expected at most 1, all that"),
        ("engine/deepspeed", "workers: 2", "workers: 11", "deepspeed.yaml: workers=11: expected at most 10, the rows"),
        ("engine/deepspeed", "workers: 2", "workers: 65", "deepspeed.yaml: workers=65: expected at most 64, all that"),
        ("engine/deepspeed", "stage: 2", "stage: 4", "conf/engine/deepspeed.yaml: stage: found 4"),
        ("generator/fleet", "generators: 2", "generators: 65", "fleet.yaml: generators=65: expected at most 64,"),
        ("generator/fleet", "kind: rows", "kind: plain", "fleet.yaml: of: kind='plain': expected rows or vllm"),
    ],
)
def test_workers_that_cannot_be_are_refused_by_the_plan(
    tmp_path: Path, path: str, old: str, new: str, expected: str
) -> None:
    clone = Clone.make(tmp_path / "clone")
    clone.set("engine", "deepspeed")
    clone.set("generator", "fleet")
    clone.change(f"conf/{path}.yaml", old, new)
    _refused(clone, "plan", expected)
    assert not clone.files()
