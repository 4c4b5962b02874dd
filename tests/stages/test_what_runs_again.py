"""Which stages a change makes stale: the real plan and the real DVC, in a clone whose outputs are stand-ins.

Nothing is trained here. Every output is a small file that DVC has committed, so each test asks one question only: after
this change and a new plan, which stages does DVC see as changed? What a stage writes is not known before it has run, so
those that read it are stale with it.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from flows import dag
from tasks.model import export_folder
from tests.stages.additions import ASKED as SYSTEM_FILE
from tests.stages.clone import HOUSE, Clone
from tests.tiny import make_model, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BRANCHED = "zerosearch"  # Its searches are answered by a service, whose file holds a prompt.
METHODS = ("search_r1_ppo", "search_r1_grpo", "stepsearch", BRANCHED)
ASKED = "asked"  # A system that is no policy and calls a service.
SYSTEMS = ("base", ASKED, *METHODS)


def _learns(*systems: str) -> set[str]:
    """The stages of these systems, and the report that reads them."""
    return {"report"} | {f"{stage}@{name}-0" for stage in ("train", "evaluate") for name in systems}


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone in which DVC has nothing to do; not to be changed."""
    clone = Clone.make(tmp_path_factory.mktemp("committed") / "clone")
    subprocess.run(["git", "init", "-q", str(clone.root)], check=True)
    clone.set("systems", f"[{', '.join(SYSTEMS)}]")
    (clone.root / "conf/service/writer.yaml").write_bytes((clone.root / "conf/service/simulator.yaml").read_bytes())
    clone.change(f"conf/method/{BRANCHED}.yaml", "documents: world", "documents: writer")
    (clone.root / "conf/system/asked.yaml").write_text(SYSTEM_FILE)
    (clone.root / "conf/service/reader.yaml").write_bytes((clone.root / "conf/service/openai.yaml").read_bytes())
    (clone.root / "tasks/systems/asked_model.py").write_bytes((HOUSE / "tests/systems/asked_model.py").read_bytes())
    clone.must("plan")
    _commit(clone.root)
    assert _stale(clone) == set()
    return clone


@pytest.fixture
def clone(committed: Clone, tmp_path: Path) -> Clone:
    """A copy to change."""
    return committed.copy(tmp_path / "clone")


def _commit(root: Path) -> None:
    """Make every output that is missing, and have DVC take all of them for results of the present plan."""
    from dvc.repo import Repo

    with contextlib.chdir(root), Repo() as repo:
        for out in (Path(out.fs_path) for stage in repo.index.stages for out in stage.outs):
            if not out.exists():
                place = out if out.suffix else out / "stand_in.json"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text("{}\n")
        for name in (
            "manifest.json",
            "questions.jsonl",
            "summary.json",
        ):  # Of these folders a stage reads single files.
            for folder in (root / "artifacts/data", root / "artifacts/augment"):
                (folder / name).write_text("{}\n")
        repo.commit(force=True)


def _stale(clone: Clone) -> set[str]:
    """What DVC would run after a new plan."""
    clone.must("plan")
    return set(_dag(clone).stale)


def _changed(clone: Clone) -> list[str]:
    """The stages of which DVC itself says that something they read has changed."""
    from dvc.repo import Repo

    with contextlib.chdir(clone.root), Repo() as repo, repo.lock:
        return [stage.addressing for stage in repo.index.stages if stage.changed_deps()]


def _dag(clone: Clone) -> dag.Dag:
    with contextlib.chdir(clone.root):
        return dag.read(Path(), done=["plan"])


def test_a_reward_and_a_method_that_uses_it_run_alone(clone: Clone) -> None:
    """In the clone, and in a folder outside, of which DVC tells as well that the plan is out of date."""
    outside = Clone(clone.root.parent / "my parts")
    for folder in ("tasks/rewards", "conf/method"):
        (outside.root / folder).mkdir(parents=True)
    clone.set("parts", f"../{outside.root.name}")
    clone.add_method("mine")
    outside.add_method("ours")
    outside.change("conf/method/ours.yaml", "title: Mine", "title: Ours")
    assert _stale(clone) == set()
    clone.set("systems", f"[{', '.join(SYSTEMS)}, mine, ours]")
    assert _stale(clone) == _learns("mine", "ours") | {"inputs@mine-0", "inputs@ours-0"}

    _commit(clone.root)
    assert _changed(clone) == []
    head = "class MyReward(AnswerReward):"
    outside.change("tasks/rewards/ours.py", head, f"{head}\n    best = 1\n")
    assert _changed(clone) == ["plan"]
    assert _stale(clone) == _learns("ours")
    clone.change("tasks/rewards/mine.py", head, f"{head}\n    best = 1\n")
    assert _stale(clone) == _learns("mine", "ours")


def test_a_retriever_that_is_compared_runs_the_comparison_alone(clone: Clone) -> None:
    code = (clone.root / "tasks/retrieval/bm25.py").read_text(encoding="utf-8")
    (clone.root / "tasks/retrieval/mine.py").write_text(code.replace('Literal["bm25"]', 'Literal["mine"]'))
    (clone.root / "conf/retriever/mine.yaml").write_text("backend: mine\nk1: 3.0\n")
    assert _stale(clone) == set()
    clone.set("compare_retrievers", "[mine]")
    assert _stale(clone) == {"retrievers", "report"}


def test_a_changed_reward_runs_those_who_use_it(clone: Clone) -> None:
    clone.change("tasks/rewards/key.py", "PART = ", "EPSILON = 0.5\nPART = ")
    assert _stale(clone) == _learns("stepsearch")


def test_a_changed_loss_runs_all_who_are_trained_with_it_and_no_start_policy(clone: Clone) -> None:
    clone.change("tasks/rl/losses/policy_clip.py", "PART = ", "EPSILON = 0.5\nPART = ")
    assert _stale(clone) == _learns(*METHODS)


GIVEN = """\
kind: pretrained
prompt: null
pretrained: {folder: given}
lora: {rank: 0}
rollout: {max_prompt_tokens: 6000, max_total_tokens: 8000}
"""


def test_a_changed_grammar_or_prompt_runs_its_users(clone: Clone) -> None:
    """With a model that plays by the prompt and grammar of its method; the tiny one brings its own."""
    clone.change("tasks/agent/grammars/stepsearch.py", "PART = ", "EPSILON = 0.5\nPART = ")
    assert _stale(clone) == set()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.config.max_position_embeddings = 8000
    export_folder(model, tokenizer, clone.root / "given")
    (clone.root / "conf/model/given.yaml").write_text(GIVEN)
    clone.set("model", "given")
    assert {name.partition("@")[0] for name in _stale(clone)} == {"base", "train", "evaluate", "report"}
    _commit(clone.root)
    clone.change("tasks/agent/grammars/stepsearch.py", "EPSILON = 0.5", "EPSILON = 0.25")
    assert _stale(clone) == _learns("stepsearch")
    _commit(clone.root)
    clone.change("conf/prompt/stepsearch.yaml", "{question}", "{question} ")
    assert _stale(clone) == _learns("stepsearch")


@pytest.mark.parametrize(
    ("service", "old", "new", "user"),
    [("writer", "short documents", "brief documents", BRANCHED), ("reader", "model: gpt-4o", "model: other", ASKED)],
)
def test_a_changed_service_runs_its_users(clone: Clone, service: str, old: str, new: str, user: str) -> None:
    clone.change(f"conf/service/{service}.yaml", old, new)
    assert _stale(clone) == _learns(user)


def test_a_file_that_nobody_uses_runs_nothing(clone: Clone) -> None:
    (clone.root / "tasks/agent/grammars/mine.py").write_text('"""Mine."""\n')
    (clone.root / "tasks/generate/mine.py").write_text('"""Mine."""\n')
    (clone.root / "conf/method/mine.yaml").write_text("extends: stepsearch\ntitle: Mine\n")
    (clone.root / "conf/retriever/mine.yaml").write_text("backend: bm25\nk1: 3.0\n")
    (clone.root / "conf/data/mine.yaml").write_text("kind: world\n")
    clone.change("tasks/params/__init__.py", "    augment: Annotated", "    mine: int = 3\n    augment: Annotated")
    clone.change("tasks/methods/loader.py", "OWN, ", "OWN, ")
    assert _stale(clone) == set()


def test_another_version_of_a_library_runs_everything(clone: Clone) -> None:
    clone.change("requirements/run.txt", "numpy==", "numpy==1")
    assert _stale(clone) == set(_dag(clone).needs) - {"plan"}


def test_better_words_run_nothing(clone: Clone) -> None:
    clone.change("tasks/train/loop.py", "One run of one method", "A single run of one method")
    clone.change("tasks/retrieval/bm25.py", "\n\n\n", "\n\n\n# A comment.\n")
    clone.change("conf/scale/smoke.yaml", "train:", "train:   # a comment")
    for name in ("world", "smoke"):
        clone.change(f"conf/data/{name}.yaml", "kind:", "# A comment.\nkind:")
    (clone.root / "tasks/rewards/README.md").write_text("Other words.\n")
    assert _stale(clone) == set()


def test_a_changed_file_runs_every_stage_that_may_load_it(clone: Clone) -> None:
    """The backend of the index is named in its manifest; who opens an index depends on that backend."""
    clone.change("tasks/retrieval/bm25.py", "def open_index", "EPSILON = 0.5\n\n\ndef open_index")
    unaffected = {"plan", "data", "validate", "retrievers"}
    stale = _stale(clone)
    assert {"index", "recall", "augment", "base@0"} <= stale
    assert not stale & unaffected


@pytest.mark.parametrize(
    ("key", "value", "groups"),
    [
        ("sampled", "false", {"evaluate", "report"}),
        ("num_bootstrap", "200", {"report"}),
        ("compare_retrievers", "[bm25]", {"retrievers", "report"}),
        ("augment", "''", None),
    ],
)
def test_a_setting_runs_the_stages_that_read_it(clone: Clone, key: str, value: str, groups: set[str] | None) -> None:
    clone.set(key, value)
    if groups is None:
        with pytest.raises(AssertionError, match=r"error: params\.yaml: unknown augment"):
            clone.must("plan")
        return
    assert {name.partition("@")[0] for name in _stale(clone)} == groups
