"""Scale `small` with a given model, its sizes cut to seconds: taught, trained, and played beside itself as it comes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.retrieval import open_retriever
from tasks.text import normalize
from tests.stages.clone import Clone, cut

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

SYSTEMS = ("as_it_comes", "base", "search_r1_grpo")
MODEL = """\
kind: pretrained
prompt: tiny
grammar: {kind: search_r1}
pretrained: {folder: given}
lora: {rank: 0}
"""
CUT = {
    "num_threads": "1",
    "dtype": "float32",
    "max_questions": "16",
    "max_steps": "4",
    "num_steps": "2",
    "rollouts_per_step": "10",
    "validate_questions": "8",
    "max_call_tokens": "48",
}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    clone = Clone.make(tmp_path_factory.mktemp("small") / "clone")
    clone.must("data", "validate", "index", "base --seed 0")
    shutil.copytree(clone.root / "artifacts/base/0/policy", clone.root / "given")
    (clone.root / "conf/model/mine.yaml").write_text(MODEL, encoding="utf-8")
    cut(clone.root / "conf/scale/small.yaml", CUT)
    for key, value in (("model", "mine"), ("scale", "small"), ("systems", f"[{', '.join(SYSTEMS)}]"), ("top_k", "0")):
        clone.set(key, value)
    clone.must(
        "recall", "retrievers", "augment", "base --seed 0", "inputs --system search_r1_grpo --seed 0",
        *(f"{stage} --system {name} --seed 0" for stage in ("train", "evaluate") for name in SYSTEMS), "report",
    )  # fmt: skip
    return clone


def test_the_start_policy_is_the_given_model_after_its_lessons(ran: Clone) -> None:
    artifacts = ran.root / "artifacts"
    record = json.loads((artifacts / "base/0/format.json").read_text())
    assert record["plans"] == 16
    assert 0 < record["demonstrations"] <= 16
    assert record["trained"] == (4 + 4) * 8, "reading, then all passages"
    start, given = (folder / "model.safetensors" for folder in (artifacts / "base/0/policy", ran.root / "given"))
    assert start.read_bytes() != given.read_bytes()
    described = {name: json.loads((artifacts / f"train/{name}-0/system.json").read_text()) for name in SYSTEMS}
    assert described["as_it_comes"]["policy"] == "given"
    assert described["base"]["policy"] == "artifacts/base/0/policy"
    assert described["as_it_comes"]["policy_sha256"] != described["base"]["policy_sha256"]


def test_only_questions_that_find_their_answer_are_trained_on(ran: Clone) -> None:
    """The trained number is that of a search for each question, made here again."""
    questions = [row for row in _rows(ran.root / "artifacts/data/questions.jsonl") if row["split"] == "train"]
    search = open_retriever(ran.root / "artifacts/index", ran.root / "artifacts/data/corpus.jsonl")
    found = set()
    for row, hits in zip(questions, search.search([row["question"] for row in questions], 3), strict=True):
        passages = f" {' '.join(normalize(f'{hit.title} {hit.text}') for hit in hits)} "
        if any(f" {normalize(answer)} " in passages for answer in row["answers"]):
            found.add(row["id"])
    summary = json.loads((ran.root / "artifacts/train/search_r1_grpo-0/summary.json").read_text())
    assert 0 < summary["num_questions"] == len(found) < len(questions)
    played = _rows(ran.root / "artifacts/train/search_r1_grpo-0/trajectories.jsonl")
    assert {row["question_id"] for row in played} <= found


def test_all_three_play_the_same_sample_greedily(ran: Clone) -> None:
    played = [_rows(ran.root / f"artifacts/evaluate/{name}-0/scores.jsonl") for name in SYSTEMS]
    assert {len(rows) for rows in played} == {16}
    assert {row["mode"] for rows in played for row in rows} == {"greedy"}
    assert len({tuple(row["question_id"] for row in rows) for rows in played}) == 1


def test_the_report_says_what_the_start_policy_was_taught_with(ran: Clone) -> None:
    text = (ran.root / "reports/results.md").read_text(encoding="utf-8")
    assert "Start policy" in text
    record = json.loads((ran.root / "artifacts/base/0/format.json").read_text())
    assert f"| 0 | {record['num_weights']:,} | 16 | {record['demonstrations']} | 64 | {record['tokens']:,} |" in text
    assert "model as it comes" in text
