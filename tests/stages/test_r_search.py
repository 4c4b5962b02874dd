"""R-Search through the real stages at their smallest size: its own start policy, its reader, training, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import store, trained
from tasks.store import read_json
from tests.stages.clone import Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

START, READER = "start --start r_search --seed 0", "reader --reader tiny_llama --seed 0"
ITEM = "--system r_search --seed 0"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone in which R-Search was trained."""
    made = Clone.make(tmp_path_factory.mktemp("r-search") / "clone")
    made.set("systems", "[r_search]")
    made.set("reference", "r_search")
    made.set("readers", "[tiny_llama]")
    made.set("starts", "[r_search]")
    made.set("tools", "[r_search]")
    made.must("plan", "data", "validate", "index", "augment", "base --seed 0", START, READER)
    made.must(f"inputs {ITEM}", f"train {ITEM}")
    return made


def test_training_begins_with_its_own_start_policy_and_asks_its_own_reader(clone: Clone) -> None:
    models = read_json(clone.root / "artifacts/inputs/r_search-0" / trained.MODELS)
    assert set(models) == {"tiny_llama", "r_search"}
    assert read_json(clone.root / trained.FOLDER / "plan.json") == {
        "tiny_llama": ["r_search"],
        "r_search": ["r_search"],
    }

    metrics = [row["metrics"] for _, row in store.read_jsonl(clone.root / "artifacts/train/r_search-0/metrics.jsonl")]
    names = {name for row in metrics for name in row}
    parts = ("evidence_f1", "has_evidence", "evidence_copied", "evidence_verbatim", "format", "f1")
    assert {f"{name}_mean" for name in parts} <= names
    settings = read_json(clone.root / "artifacts/train/r_search-0/summary.json")["settings"]
    assert settings["method"]["grammar"]["kind"] == "r_search"
    start = read_json(clone.root / trained.FOLDER / "r_search-0/tokenizer.json")
    assert " <original_evidence>" in [token["content"] for token in start["added_tokens"]]


def test_its_policy_is_evaluated_in_its_own_grammar(clone: Clone) -> None:
    clone.must(f"evaluate {ITEM}")
    rows = [row for _, row in store.read_jsonl(clone.root / "artifacts/evaluate/r_search-0/trajectories.jsonl")]
    assert rows
    observed = "".join(turn["observation"] for row in rows for turn in row["turns"])
    assert "<information>" not in observed


def test_its_evidence_is_read_by_another_model_and_judged_in_the_report(clone: Clone, tmp_path: Path) -> None:
    copy = clone.copy(tmp_path / "copy")
    copy.must("tool --tool r_search --seed 0")
    folder = copy.root / "artifacts/tool/r_search-0"
    rows = [row for _, row in store.read_jsonl(folder / "answers.jsonl")]
    summary = read_json(folder / "summary.json")
    assert len(rows) == 5 * summary["num_questions"] > 0
    assert any(row["answer"] for row in rows)
    assert summary["services"]["reader"]["calls"] == sum(row["answer"] is not None for row in rows)
    assert summary["policy_sha256"] == read_json(copy.root / "artifacts/train/r_search-0/summary.json")["policy_sha256"]

    before = copy.files("artifacts/tool")
    copy.must("tool --tool r_search --seed 0")
    assert copy.files("artifacts/tool") == before

    copy.must(f"evaluate {ITEM}", "recall", "retrievers", "report")
    report = (copy.root / "reports/results.md").read_text()
    assert "## Evidence as a tool" in report
    cells = (copy.root / "reports/results.csv").read_text()
    assert "r_search - plain search,all,all,all,greedy,em_of_reader," in cells


def test_another_reader_than_the_planned_one_ends_the_run(clone: Clone, tmp_path: Path) -> None:
    copy = clone.copy(tmp_path / "copy")
    card = copy.root / trained.FOLDER / "tiny_llama-0/reading.json"
    card.write_text(card.read_text().replace("Question", "question"))
    done = copy.stage(f"train {ITEM}")
    assert done.returncode == 1
    assert "error: artifacts/models/tiny_llama-0/reading.json" in done.stderr


@pytest.mark.parametrize("line", [START, READER])
def test_making_a_model_again_gives_the_same_bytes(clone: Clone, tmp_path: Path, line: str) -> None:
    copy = clone.copy(tmp_path / "copy")
    before = copy.files("artifacts/models")
    copy.must(line)
    assert copy.files("artifacts/models") == before


def test_a_run_that_does_not_list_them_is_refused_with_the_line_to_write(clone: Clone, tmp_path: Path) -> None:
    copy = clone.copy(tmp_path / "copy")
    copy.set("starts", "[]")
    done = copy.stage("plan")
    assert done.returncode == 1
    assert "Write `starts: [r_search]`." in done.stderr
