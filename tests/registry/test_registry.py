"""Policies in a real registry: which one is registered, who becomes champion, and that a registered one plays."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from tasks import conf, parts, planned, store
from tasks.agent.grammars.r_search import RSearchGrammar
from tasks.data.records import question_row
from tasks.model_files import weights_sha256
from tasks.records import systems
from tasks.records.systems import SystemRecord
from tasks.registry import __main__ as registry
from tasks.registry import card as cards
from tests.pipeline.toy import HOUSE
from tests.stages.test_tracking import _env, _mlflow
from tests.tiny import PROMPT
from tests.tool.conftest import BUDGET, Learned, learned  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
HEAD = "policy,seed,dataset,hops,mode,metric,value\n"


class Clone:
    """What a run with trained systems has left, as far as the registry reads it."""

    def __init__(self, root: Path, given: Learned) -> None:
        self.root, self.given, self.means = root, given, {}
        # Two policies of three questions cannot be told apart.
        self.questions = [replace(given.questions[i % 3], id=f"q/{i}", split="test") for i in range(12)]
        shutil.copytree(given.index, root / "artifacts/index")
        shutil.copytree(HOUSE / "requirements", root / "requirements", dirs_exist_ok=True)
        store.write_jsonl(root / "artifacts/data/questions.jsonl", map(question_row, self.questions))

    def add(self, name: str, ems: str, is_trained: bool = True, scale: float = 1) -> None:
        """A system with one seed, and its exact match by question; its weights are the given ones times `scale`."""
        folder = self.root / "artifacts/train" / f"{name}-0"
        shutil.copytree(self.given.folder / "policy", folder / "policy")
        weights = folder / "policy/model.safetensors"
        tensors = {key: tensor * scale for key, tensor in load_file(weights).items()}
        save_file(tensors, weights, {"format": "pt", "name": name})  # No two systems have the same bytes.
        about = {"name": name, "seed": 0, "kind": "policy", "policy": "p", "made_by": "x"}
        about["policy_sha256"] = weights_sha256(folder / "policy")
        systems.write(folder, SystemRecord(**about, is_trained=is_trained))
        store.write_json(folder / "summary.json", {"data_sha256": "d", "config_sha256": "c"})
        playing = {
            "prompt": conf.plain(PROMPT),
            "grammar": parts.plain(RSearchGrammar()),
            "rollout": conf.plain(BUDGET),
        }
        settings = {
            "system": name, "seed": 0, "playing": {"kind": "policy", **playing, "services": {}}, "data": "world",
            "generator": {"kind": "plain"}, "retriever": {"backend": "bm25"}, "splits": ["test"], "max_questions": 0,
            "sampled": False, "max_failed_share": 0.0, "top_k": 0, "num_threads": 1, "dtype": "float32",
        }  # fmt: skip
        planned.write(self.root / planned.FOLDER, f"evaluate@{name}-0", planned.Plan(settings, {}, "l"))
        rows = [_score(question.id, float(em)) for question, em in zip(self.questions, ems, strict=True)]
        store.write_jsonl(self.root / "artifacts/evaluate" / f"{name}-0/scores.jsonl", rows)
        self.means[name] = sum(map(int, ems)) / len(ems)
        lines = [f"{one},all,all,all,greedy,em,{mean}" for one, mean in self.means.items()]
        (self.root / "reports").mkdir(exist_ok=True)
        (self.root / cards.RESULTS).write_text(HEAD + "\n".join([*lines, ""]))

    def run(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "tasks.registry", *words]
        return subprocess.run(command, cwd=self.root, env=_env(**env), capture_output=True, text=True, timeout=250)


def in_this_process(root: Path, *words: str, **env: str) -> str:
    """`python -m tasks.registry words` in a folder, by this process, which has the libraries; what it printed.

    What the command sets for its own process is taken back.
    """
    said = io.StringIO()
    with (
        contextlib.chdir(root),
        mock.patch.dict(os.environ, _env(**env), clear=True),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.object(warnings, "showwarning", warnings.showwarning),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        registry.main(list(words))
    return said.getvalue()


def _score(name: str, em: float) -> dict[str, Any]:
    return {
        "question_id": name, "dataset": "world", "split": "test", "hops": 2, "type": None, "mode": "greedy", "em": em,
        "f1": em, "subem": em, "searches": 2, "actions": 3, "valid_actions": 3, "recall": None, "status": "answered",
        "answer_in_passage": None, "answer_shown": None,
        "generated_tokens": 9, "prefill_tokens": 9, "answer": "x",
    }  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path, learned: Learned) -> Clone:  # noqa: F811
    return Clone(tmp_path / "clone", learned)


def _card(name: str, ems: str, **changes: Any) -> cards.Card:
    settings = {"top_k": 0, "playing": {"rollout": {"top_k": 3}}}
    scores = {f"q{number}": float(em) for number, em in enumerate(ems)}
    given = cards.Card(name, 0, settings, "d", f"hash of {name}", "c", "g", False, {}, {}, scores)
    return replace(given, **changes)


def test_the_lead_is_paired_and_only_between_equal_measurements() -> None:
    champion = _card("old", "1010101010" * 4)
    lead = cards.lead(_card("new", "1010101011" * 4), champion)  # 4 of 40 questions more: 0.1.
    assert lead.mean == pytest.approx(0.1)
    assert 0 < lead.low < 0.1 < lead.high < 0.25
    assert cards.lead(_card("luck", "0111101010" * 4), champion).low <= 0  # 0.1 again, of 12 won and 8 lost.
    for changes, what in (
        ({"data_sha256": "e"}, "data"),
        ({"settings": {"top_k": 1}}, "passages per search"),
        ({"scores": {"q0": 1.0}}, "questions"),
    ):
        with pytest.raises(ValueError, match=f"different {what}"):
            cards.lead(_card("new", "1" * 40, **changes), champion)


def test_the_first_is_champion_and_a_better_one_takes_the_alias(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clone.root}/mlflow.db")
    monkeypatch.chdir(clone.root)
    clone.add("base", "1" * 12, is_trained=False)
    assert registry.main(["register"]) == 1
    assert "no trained system" in capsys.readouterr().err

    clone.add("first", "010" * 4)
    assert registry.main(["register"]) == 0
    said = capsys.readouterr().out
    assert "first-0 is version 1" in said
    assert "It is the first one, and the champion" in said
    registry.main(["register"])
    assert "is version 1 of search-agent already" in capsys.readouterr().out

    clone.add("even", "010" * 3 + "110")  # Better on one question: the interval reaches to 0.
    registry.main(["register"])
    assert "first-0 stays the champion: 0.083 [0.000" in capsys.readouterr().out
    clone.add("better", "110" * 4)
    registry.main(["register"])
    said = capsys.readouterr().out
    assert "better-0 is version 3" in said
    assert "It is the new champion: 0.333 [0." in said


def test_weights_that_are_not_those_of_the_card_are_neither_played_nor_registered(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after the clone has moved: its registry goes with it, and writes nothing where it was."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    clone.add("first", "010" * 4)
    monkeypatch.chdir(clone.root)
    assert registry.main(["register"]) == 0
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    monkeypatch.chdir(moved)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow has set it for children of this process.
    capsys.readouterr()
    assert registry.main(["evaluate", "champion"]) == 0
    assert "first-0 (version 1 of search-agent, 12 questions): exact match 1.000" in capsys.readouterr().out
    assert not clone.root.exists()

    (weights,) = (moved / ".scratch/mlflow").rglob("policy/model.safetensors")
    (card,) = (moved / ".scratch/mlflow").rglob("card.json")
    kept = weights.read_bytes(), card.read_text()
    save_file({name: tensor * 0.5 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    forged = card.read_text().replace(
        weights_sha256(moved / "artifacts/train/first-0/policy"), weights_sha256(weights.parent)
    )
    for text in (kept[1], forged):
        card.write_text(text)
        assert registry.main(["evaluate", "1"]) == 1
        said = capsys.readouterr().err
        assert "version 1 of search-agent: its weights have the hash" in said
        assert "changed after they were registered" in said

    weights, _ = moved / "artifacts/train/first-0/policy/model.safetensors", weights.write_bytes(kept[0])
    save_file({name: tensor * 0.5 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    assert registry.main(["register"]) == 1
    assert "the files are damaged or were exchanged" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.servers
def test_a_registered_policy_plays_anywhere_and_a_changed_weight_shows(clone: Clone, tmp_path: Path) -> None:
    """Through a real server, in a folder and a process that know nothing of the clone."""
    clone.add("known", "1" * 12)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with _mlflow(tmp_path) as address:
        env = {"MLFLOW_TRACKING_URI": address}
        done = clone.run("register", **env)
        assert "known-0 is version 1" in done.stdout, done.stderr

        done = subprocess.run(
            [sys.executable, "-c", PLAYED, *(question.question for question in clone.questions)],
            cwd=elsewhere, env={key: value for key, value in _env(**env).items() if key != "PYTHONPATH"},
            capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        played = json.loads(done.stdout)
        assert played["answers"] == [question.answers[0] for question in clone.questions]
        assert all(len(searches) == 2 for searches in played["searches"])
        assert played["inputs"] == ["question"]
        assert played["example"] == [question.question for question in clone.questions[:2]]
        assert not [name for name in played["files"] if name.endswith((".pkl", ".pickle", ".pt", ".bin"))]

        said = in_this_process(clone.root, "evaluate", "champion", "--out", "one.json", **env)
        assert said.startswith("known-0 (version 1 of search-agent, 12 questions): exact match 1.000 [0."), said
        one = store.read_json(clone.root / "one.json")
        in_this_process(clone.root, "evaluate", "1", "--out", "two.json", **env)
        assert one == store.read_json(clone.root / "two.json")

        clone.add("changed", "1" * 12, scale=0.5)
        (clone.root / cards.RESULTS).write_text(HEAD + "changed,all,all,all,greedy,em,1.0\n")
        assert "changed-0 is version 2" in in_this_process(clone.root, "register", **env)
        in_this_process(clone.root, "evaluate", "2", "--out", "three.json", **env)
        changed = store.read_json(clone.root / "three.json")
        assert changed["em"][0] < 1
        assert changed["scores_sha256"] != one["scores_sha256"]
        assert in_this_process(clone.root, "evaluate", "9", **env).startswith("error: ")


PLAYED = """\
import json, sys
from pathlib import Path
import mlflow, pandas
from mlflow.artifacts import download_artifacts

uri = "models:/search-agent@champion"
model = mlflow.pyfunc.load_model(uri)
found = model.predict(pandas.DataFrame({"question": sys.argv[1:]}))
print(json.dumps({
    "answers": list(found["answer"]), "searches": [list(one) for one in found["searches"]],
    "inputs": model.metadata.signature.inputs.input_names(), "example": list(model.input_example["question"]),
    "files": [path.name for path in Path(download_artifacts(uri)).rglob("*")],
}))
"""
