"""Artifacts of a few runs in which every score and every validation is given, so that results are known by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.report.table import Results, build
from tasks.report.training import TrainingRun, read_trainings
from tasks.store import write_json, write_jsonl
from tests.report.fake_artifacts import CONFIG, augmentation, write_system

Row = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """One run: exact match by question (a digit each), the metrics of its steps, and more of its summary.

    `searches` and `hops` have a digit a question, too; where they are empty every digit is 1.
    """

    ems: str
    steps: Sequence[Row] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    searches: str = ""
    hops: str = ""


def validations(*points: tuple[int, float]) -> list[Row]:
    """Steps with nothing but (generated tokens, validation EM)."""
    return [{"generated_tokens_total": tokens, "validation_em": em} for tokens, em in points]


def small(
    root: Path, runs: Mapping[str, Given], seeds: Sequence[int] = (0, 1)
) -> tuple[Results, Sequence[TrainingRun]]:
    """Results and training runs of `<policy>-<seed>` -> what is given; the start policy answers nothing."""
    artifacts = root / "artifacts"
    write_json(artifacts / "data" / "manifest.json", {"data_sha256": "d"})
    write_json(artifacts / "recall.json", {"datasets": {}, **CONFIG})
    write_json(artifacts / "retrievers.json", {"retrievers": {}, "differences": {}, **CONFIG})
    write_json(artifacts / "augment" / "summary.json", augmentation())
    write_json(artifacts / "validation.json", {})
    length = len(next(iter(runs.values())).ems)
    base = {f"base-{seed}": Given("0" * length, hops=next(iter(runs.values())).hops) for seed in seeds}
    for name, given in {**base, **runs}.items():
        policy, _, seed = name.rpartition("-")
        own = {"seed": int(seed), "data_sha256": "d", "policy_sha256": f"hash of {name}", "settings": {}, **CONFIG}
        folder = artifacts / "evaluate" / name
        write_jsonl(folder / "scores.jsonl", [_score(i, given) for i in range(len(given.ems))])
        write_json(folder / "summary.json", own | {"policy": policy})
        write_system(artifacts, policy, int(seed), is_trained=name in runs, policy_sha256=f"hash of {name}")
        if name in runs:
            counts = {"steps": 1, "num_trajectories": 1, "generated_tokens": 1, "prefill_tokens": 1, "searches": 1}
            write_json(artifacts / "train" / name / "summary.json", own | counts | {"method": policy} | given.summary)
            rows = [{"step": step, "metrics": metrics} for step, metrics in enumerate(given.steps)]
            write_jsonl(artifacts / "train" / name / "metrics.jsonl", rows)
    methods = dict.fromkeys(name.rpartition("-")[0] for name in runs)
    results = build(artifacts, ["base", *methods], seeds, "base", 200)
    return results, read_trainings(results.runs, artifacts)


def answer(*queries: str, said: str = "x", step: int | None = None, question: str = "q") -> Row:
    """A row of `trajectories.jsonl` whose right answer is x: these searches, then an answer."""
    turn = {
        "reward": 0.0,
        "tokens": None,
        "advantages": None,
        "logprobs": None,
        "text": "",
        "observation": "",
        "hits": [],
    }
    turns = [{"kind": "search", "content": query, "executed": True} | turn for query in queries]
    turns.append({"kind": "answer", "content": said, "executed": False} | turn)
    return {
        "question_id": question, "question": "?", "answers": ["X"], "gold_passage_ids": [], "dataset": "world",
        "hops": 2,
        "policy": "base", "seed": 0, "step": step, "mode": "sampled", "status": "answered", "answer": said,
        "prompt": None, "outcome": 0.0, "turns": turns,
    }  # fmt: skip


def _score(number: int, given: Given) -> Row:
    em = float(given.ems[number])
    hops, searches = (int(digits[number]) if digits else 1 for digits in (given.hops, given.searches))
    return {
        "question_id": f"q{number:03d}", "dataset": "world", "split": "test", "hops": hops, "type": None,
        "mode": "greedy", "em": em, "f1": em, "subem": em, "searches": searches, "actions": 1, "valid_actions": 1,
        "recall": None, "answer_in_passage": None, "answer_shown": None,
        "status": "answered", "generated_tokens": 1, "prefill_tokens": 1, "answer": "x",
    }  # fmt: skip
