"""SmolLM2 of the package through every stage at scale `small`, its sizes cut, on a folder of questions and passages.

It learns nothing of use in so few steps: the plays are text of a real model that does not know the format yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stages.clone import Clone, cut

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CUT = {
    "num_threads": "1",
    "max_questions": "12",
    "max_steps": "1",
    "batch": "2",
    "num_steps": "1",
    "rollouts_per_step": "10",
    "validate_questions": "2",
    "max_batch_tokens": "1024",
    "max_turns": "2",
    "max_call_tokens": "48",
    "max_observation_tokens": "256",
    "max_total_tokens": "1024",
}
REWARD = '''\
"""A reward that differs between the plays of a question, however little was taught."""

from dataclasses import dataclass

from tasks.rewards import EachReward, on_last_token
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class OddReward(EachReward):
    """1 where the ids of the response have an odd sum."""

    components = ("odd",)

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        value = float(sum(trajectory.response_ids) % 2)
        return on_last_token(trajectory, value, odd=value)


PART = OddReward
'''
METHOD = "extends: search_r1_grpo\ntitle: Odd\nrewards: {answer: null, odd: {}}\n"
SYSTEMS = ("as_it_comes", "base", "odd")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    clone = Clone.make(tmp_path_factory.mktemp("smollm2") / "clone")
    cut(clone.root / "conf/scale/small.yaml", CUT)
    clone.change("conf/model/smollm2-135m.yaml", "512, max_total_tokens: 2048", "256, max_total_tokens: 1024")
    (clone.root / "tasks/rewards/odd.py").write_text(REWARD, encoding="utf-8")
    (clone.root / "conf/method/odd.yaml").write_text(METHOD, encoding="utf-8")
    clone.must("data")
    (clone.root / "given").mkdir()
    for name in ("corpus.jsonl", "questions.jsonl"):
        (clone.root / "artifacts/data" / name).rename(clone.root / "given" / name)
    for key, value in {
        "model": "smollm2-135m", "scale": "small", "systems": f"[{', '.join(SYSTEMS)}]", "top_k": "0", "data": "folder",
        "data_folder": "given",
    }.items():  # fmt: skip
        clone.set(key, value)
    planned = clone.stage("plan")
    if "the package index cannot be reached" in planned.stderr:
        pytest.skip(planned.stderr.splitlines()[-1])
    clone.must(
        "data", "validate", "index", "recall", "retrievers", "augment", "base --seed 0", "inputs --system odd --seed 0",
        *(f"{stage} --system {name} --seed 0" for stage in ("train", "evaluate") for name in SYSTEMS), "report",
    )  # fmt: skip
    return clone


def test_teaching_and_training_change_the_weights(ran: Clone) -> None:
    artifacts = ran.root / "artifacts"
    folders = ("models/SmolLM2-135M-Instruct", "artifacts/base/0/policy", "artifacts/train/odd-0/policy")
    contents = [(ran.root / folder / "model.safetensors").read_bytes() for folder in folders]
    assert len(set(contents)) == len(folders)
    taught = json.loads((artifacts / "base/0/format.json").read_text())
    assert taught["num_weights"] == 134_515_008
    assert taught["demonstrations"] > 0


def test_plays_are_in_its_chat_template_with_the_question(ran: Clone) -> None:
    questions = {row["id"]: row["question"] for row in _rows(ran.root / "artifacts/data/questions.jsonl")}
    played = _rows(ran.root / "artifacts/train/odd-0/trajectories.jsonl")
    assert played
    for row in played:
        assert row["question"] == questions[row["question_id"]]
        begins, _, rest = row["prompt"].partition(row["question"])
        assert begins.startswith("<|im_start|>system\n")
        assert begins.endswith("<|im_start|>user\n")
        assert rest == "<|im_end|>\n<|im_start|>assistant\n"
        assert all(len(turn["tokens"]) == len(turn["logprobs"]) > 0 for turn in row["turns"])
    assert {row["outcome"] for row in played} == {0.0, 1.0}


def test_all_three_are_evaluated_and_stand_in_the_report(ran: Clone) -> None:
    for name in SYSTEMS:
        scores = _rows(ran.root / f"artifacts/evaluate/{name}-0/scores.jsonl")
        assert len(scores) == 12
        assert all(0 <= row["em"] <= row["f1"] <= 1 for row in scores)
    text = (ran.root / "reports/results.md").read_text(encoding="utf-8")
    assert "model as it comes" in text
    assert "| Odd" in text
    assert "Our own split of published rows" in text
