"""A sample of real questions and passages through every stage, from a folder, at the smallest size."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.skips import REAL, REAL_LIKE, needs_shared
from tests.stages.clone import Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NUM_QUESTIONS, NUM_OTHERS = 300, 2000
Row = dict[str, Any]


def _rows(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _sample(folder: Path) -> list[Row]:
    """Write questions of every dataset (half of them train rows), their passages, and others; the questions."""
    rng = random.Random(0)
    questions = [row for path in sorted(REAL.glob("*/questions.jsonl.gz")) for row in _rows(path)]
    train = [row for row in questions if row["split"] == "train"]
    held_out = [row for row in questions if row["split"] != "train"]
    chosen = rng.sample(train, NUM_QUESTIONS // 2) + rng.sample(held_out, NUM_QUESTIONS // 2)
    needed = {i for row in chosen for i in (*row["gold_passage_ids"], *row["silver_passage_ids"])}
    needed |= {hop["support_passage_id"] for row in chosen for hop in row["decomposition"]}
    passages = list(_rows(REAL / "corpus.jsonl.gz"))
    others = set(rng.sample(range(len(passages)), NUM_OTHERS))
    kept = [row for i, row in enumerate(passages) if row["id"] in needed or i in others]
    for name, rows in (("questions", chosen), ("corpus", kept)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return chosen


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@needs_shared(REAL)
def test_real_data_goes_through_every_stage(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    chosen = _sample(folder)
    clone = Clone.make(tmp_path / "clone")
    for key, value in (("data", "folder"), ("data_folder", str(folder)), ("systems", "[base, search_r1_grpo]")):
        clone.set(key, value)
    clone.set("compare_retrievers", "[bm25]")
    clone.must(
        "data", "validate", "index", "recall", "retrievers", "augment", "base --seed 0",
        "inputs --system search_r1_grpo --seed 0",
        "train --system base --seed 0", "train --system search_r1_grpo --seed 0",
        "evaluate --system base --seed 0", "evaluate --system search_r1_grpo --seed 0", "report",
    )  # fmt: skip
    artifacts = clone.root / "artifacts"

    manifest = json.loads((artifacts / "data/manifest.json").read_text())
    left_out = {*manifest["unscorable"]["rows_dropped"], *manifest["leakage"]["train_rows_dropped"]}
    sets = {row["dataset"] for row in chosen if row["split"] == "test"}
    held_out = {r["id"] for r in chosen if r["split"] == ("test" if r["dataset"] in sets else "dev")} - left_out
    assert len(held_out) > 60
    assert manifest["corpus"]["rows"] > NUM_OTHERS

    recall = json.loads((artifacts / "recall.json").read_text())["datasets"]
    complete = Counter(row["dataset"] for row in chosen if row["gold_complete"] and row["id"] not in left_out)
    assert complete
    assert all(recall[name]["num_questions"] == count for name, count in complete.items())
    assert all(0.2 < recall[name]["recall@10"] <= 1 for name, count in complete.items() if count > 20)

    compared = json.loads((artifacts / "retrievers.json").read_text())["retrievers"]["bm25"]["datasets"]
    assert {name: row["recall@5"]["value"] for name, row in compared.items() if name in complete} == {
        name: recall[name]["recall@5"] for name in complete
    }

    for policy in ("base", "search_r1_grpo"):
        scores = _read(artifacts / f"evaluate/{policy}-0/scores.jsonl")
        greedy = [row for row in scores if row["mode"] == "greedy"]
        assert {row["question_id"] for row in greedy} <= held_out
        assert len(greedy) == 60 == len(scores) / 2
    base = _read(artifacts / "evaluate/base-0/scores.jsonl")
    acting = [row for row in base if row["searches"] > 0 and row["valid_actions"] > 0]
    assert acting, "a start policy that never acts would show no reward at work"
    trained_on = {row["question_id"] for row in _read(artifacts / "train/search_r1_grpo-0/trajectories.jsonl")}
    assert trained_on <= {row["id"] for row in chosen if row["split"] == "train"}
    report = (clone.root / "reports/results.md").read_text(encoding="utf-8")
    assert all(f"| {name} | bm25 | {count} |" in report for name, count in complete.items())
    # The plan repeats the settings as params.yaml has them, the folder's path too; no result holds a place.
    results = [data for path, data in clone.files("artifacts").items() if not path.startswith("artifacts/plan/")]
    assert str(tmp_path).encode() not in b"".join(results)


def test_rows_in_the_format_of_real_data_go_through_every_stage_that_reads_them(tmp_path: Path) -> None:
    clone = Clone.make(tmp_path / "clone")
    for key, value in (("data", "folder"), ("data_folder", str(REAL_LIKE)), ("systems", "[base, search_r1_grpo]")):
        clone.set(key, value)
    clone.must("data", "validate", "index", "recall", "augment")
    artifacts = clone.root / "artifacts"
    manifest = json.loads((artifacts / "data/manifest.json").read_text())
    assert manifest["unscorable"]["rows_dropped"] == ["nq/a5"]
    rows = {name: counts["rows"] for name, counts in manifest["questions"].items()}
    assert rows == {"2wikimultihopqa": 2, "musique": 4, "nq": 4}
    recall = json.loads((artifacts / "recall.json").read_text())["datasets"]
    assert {name: row["num_questions"] for name, row in recall.items()} == {"2wikimultihopqa": 2, "musique": 3, "nq": 4}
    hops = {row["question_id"]: row["hops"] for row in _read(artifacts / "augment/hops.jsonl")}
    assert [hop["question"] for hop in hops["musique/2hop__2"]] == [
        "What is the rises in canton of Rhône?",
        "What is the capital of Valais?",
    ]
    assert str(tmp_path).encode() not in b"".join(
        data for path, data in clone.files("artifacts").items() if not path.startswith("artifacts/plan/")
    )
