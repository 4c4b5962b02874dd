"""The stages of a reward model in a clone of the house: killed and resumed to the same bytes, and its users."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tasks import params
from tasks.runner import ledger
from tests.services.completions import Completions, completion, serving
from tests.stages.clone import PATIENCE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

ITEM = "--reward_model pica --seed 0"
STAGES = tuple(f"{stage} {ITEM}" for stage in ("trajectories", "labels", "reward_model"))
MADE = ("artifacts/trajectories", "artifacts/labels", "artifacts/models/pica-0")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Everything that a reward model needs; not to be changed."""
    clone = Clone.make(tmp_path_factory.mktemp("reward_model") / "clone")
    clone.set("systems", "[base, pica]")
    clone.set("reward_models", "[pica]")
    clone.must("data", "validate", "index", "recall", "augment", "base --seed 0")
    return clone


@pytest.fixture(scope="module")
def made(started: Clone, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """With the reward model of an undisturbed run."""
    clone = started.copy(tmp_path_factory.mktemp("made") / "clone")
    clone.must(*STAGES)
    return clone


def test_the_model_is_an_ordinary_folder_with_card_figures_and_samples(made: Clone) -> None:
    folder = made.root / MADE[2]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "quality.json", "manifest.json"} < names
    quality = json.loads((folder / "quality.json").read_text())
    labels = json.loads((made.root / "artifacts/labels/pica-0/summary.json").read_text())
    assert quality["facts"]["labels"] == labels
    assert labels["read"] == labels["kept"] == 40
    assert quality["num_trajectories"] == 8
    assert 0 <= quality["ece"] <= 1
    assert {"control_auc", "blanked_auc"} < quality["facts"].keys()
    rows = [json.loads(line) for line in (made.root / "artifacts/labels/pica-0/labels.jsonl").read_text().splitlines()]
    by_part = {part: {row["question_id"] for row in rows if row["part"] == part} for part in ("train", "held_out")}
    assert not by_part["train"] & by_part["held_out"]
    assert all("train" in row["question_id"] for row in rows)  # Training questions only.


def _wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 100
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"{folder} has no {pattern}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("stage", "sign"),
    [("trajectories", "trajectories@*/0000-*.jsonl"), ("reward_model", "reward_model@*/fit/step-*/manifest.json")],
)
def test_a_killed_stage_goes_on_to_the_same_bytes(
    started: Clone, made: Clone, tmp_path: Path, stage: str, sign: str
) -> None:
    clone = started.copy(tmp_path / "clone")
    clone.must(*STAGES[: [line.split()[0] for line in STAGES].index(stage)])
    process = clone.start(f"tasks.stages.{stage}", *ITEM.split())
    _wait_for(clone.root / ".scratch/work", sign)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    clone.must(*STAGES)
    assert clone.files(*MADE) == made.files(*MADE)


LABELLER = """kind: chat_labeller
prompt: "{answer} {num_hops} {hops} {trajectory} {num_searches}"
chat:
  base_url: %s
  model: labeller-1
  key_variable: ""
  max_in_flight: 2
  max_requests: 1000
  max_total_tokens: 100000
  request: {}
""" + textwrap.indent(PATIENCE, "  ")
TURN = {"content": "x", "executed": True, "kind": "search", "observation": "y"}
RECORDED = {"reward": 0.0, "tokens": None, "advantages": None, "logprobs": None, "hits": []}


def _label_by_model(clone: Clone, server: Completions) -> None:
    (clone.root / "conf/service/chat_labeller.yaml").write_text(LABELLER % server.url)
    path = clone.root / "conf/reward_model/pica.yaml"
    path.write_text(path.read_text().replace("labeller: rule_labeller", "labeller: chat_labeller"))
    clone.must("plan")


def _let_search(path: Path, turn: dict[str, Any]) -> int:
    """Let every play of this file search once, each with a text of its own; returns their number."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    turns = [[turn | {"text": f"<search> {number} </search>"}] for number in range(len(rows))]
    path.write_text("".join(json.dumps(row | {"turns": own}) + "\n" for row, own in zip(rows, turns, strict=True)))
    return len(rows)


def _asking(made: Clone, folder: Path, server: Completions) -> Clone:
    """A clone whose plays all search once, and are labelled by a chat model."""
    clone = made.copy(folder)
    _label_by_model(clone, server)
    _let_search(clone.root / MADE[0] / "pica-0/trajectories.jsonl", TURN | {"queries": []})
    return clone


def test_labels_that_break_an_expectation_end_the_stage(made: Clone, tmp_path: Path) -> None:
    """The same play twice: every row is well-formed, so only the rule between rows can find it."""
    clone = made.copy(tmp_path / "clone")
    before = clone.files("artifacts/labels")
    path = clone.root / "artifacts/trajectories/pica-0/trajectories.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    found = clone.stage(STAGES[1])
    assert found.returncode == 1
    assert "question_id/copy" in found.stderr, found.stderr
    assert clone.files("artifacts/labels") == before


def test_labels_killed_while_a_model_labels_are_the_same_and_paid_once(made: Clone, tmp_path: Path) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.03)
        sign = "+" if len(str(body["messages"])) % 2 else "-"
        return 200, completion(json.dumps({"reason": "so", "labels": [sign]}))

    with serving() as server:
        server.answer = slow
        whole = _asking(made, tmp_path / "whole", server)
        whole.must(STAGES[1])
        asked = len(server.asked)
        assert asked == 40

        killed = _asking(made, tmp_path / "killed", server)
        process = killed.start("tasks.stages.labels", *ITEM.split())
        until = time.monotonic() + 60
        while len(server.asked) < asked + 15:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed.must(STAGES[1])
        assert asked + 40 <= len(server.asked) <= asked + 40 + 4  # Some were in flight.

    assert killed.files(MADE[1]) == whole.files(MADE[1])
    summary = json.loads((killed.root / MADE[1] / "pica-0/summary.json").read_text())
    assert summary["services"] == {"labeller": {"calls": 40, "tokens": 2000, "failures": 0}}
    assert 0 < summary["pivots"] < summary["searches"] == 40
    measured = [ledger.read(clone.root)["labels@pica-0"]["services"]["labeller"]["hits"] for clone in (whole, killed)]
    assert measured[0] == 0
    assert measured[1] >= 13


def test_its_users_get_it_and_refuse_another_one(made: Clone, tmp_path: Path) -> None:
    clone = made.copy(tmp_path / "clone")
    clone.must("inputs --system pica --seed 0", "inputs --system base --seed 0")
    models = {name: json.loads((clone.root / f"artifacts/inputs/{name}-0/models.json").read_text())
              for name in ("base", "pica")}  # fmt: skip
    assert models["base"] == {}
    assert models["pica"]["pica"]["folder"] == "artifacts/models/pica-0"
    clone.must("train --system base --seed 0", "train --system pica --seed 0")
    rows = [json.loads(line) for line in (clone.root / "artifacts/train/pica-0/trajectories.jsonl").open()]
    notes = [note for row in rows for note in row.get("notes", [])]
    assert any(note["name"] == "f(t)" for note in notes)

    clone.must(*(f"evaluate --system {name} --seed 0" for name in ("base", "pica")), f"reward_quality {ITEM}")
    later = json.loads((clone.root / "artifacts/quality/pica-0/quality.json").read_text())
    assert later.keys() == {"base", "pica"}
    summary = clone.root / "artifacts/quality/pica-0/summary.json"
    plays = sum(one["num_trajectories"] for one in later.values())
    assert json.loads(summary.read_text()) == {"plays": plays}
    clone.must("retrievers", "report")
    page = (clone.root / "reports/index.html").read_text()
    assert all(f'"id":"{one}"' in page for one in ("reward-models", "reward-models-later", "audit"))
    assert "## Reward models" in (clone.root / "reports/results.md").read_text()
    assert "| AUC, shuffled labels | AUC, without words |" in (clone.root / "reports/results.md").read_text()
    assert "Labels to audit" not in (clone.root / "reports/results.md").read_text()

    played = [clone.root / f"artifacts/evaluate/{name}-0/trajectories.jsonl" for name in ("base", "pica")]
    count = sum(_let_search(path, TURN | RECORDED) for path in played)
    with serving() as server:
        server.answer = lambda body: (200, completion({"reason": "so", "labels": ["+"]}))
        _label_by_model(clone, server)
        for is_again in (False, True):
            clone.must(f"reward_quality {ITEM}")
            used = {"labeller": {"calls": count, "tokens": 50 * count, "failures": 0}}
            assert json.loads(summary.read_text())["services"] == used
            hits = ledger.read(clone.root)["reward_quality@pica-0"]["services"]["labeller"]["hits"]
            assert hits == (count if is_again else count - len(server.asked))

    weights = clone.root / MADE[2] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    done = clone.stage("train --system pica --seed 0")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "artifacts/models/pica-0/model.safetensors: missing, or another file than manifest.json names" in line


def test_a_list_of_models_that_does_not_fit_ends_the_plan(started: Clone, tmp_path: Path) -> None:
    clone = started.copy(tmp_path / "clone")
    clone.set("reward_models", "[]")
    assert params.read(clone.root).reward_models == ()
    done = clone.stage("plan")
    assert done.returncode == 1
    assert "Write `reward_models: [pica]`." in done.stderr
