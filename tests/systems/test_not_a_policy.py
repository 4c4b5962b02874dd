"""A system that is no policy goes through the same evaluation, table and viewer as policies do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tasks.data.expectations import check
from tasks.evaluate.play import Evaluation, evaluate
from tasks.records import schema, systems
from tasks.report.page import write_page
from tasks.report.table import Results, build, markdown
from tasks.report.terminal import fitted
from tasks.retrieval import RetrievalError
from tasks.store import DataError, read_jsonl, write_json
from tasks.types import Hit, Question
from tests.report.browser import Browser
from tests.report.fake_artifacts import DATA, write_artifacts, write_system
from tests.report.test_page import MODE, choose, text
from tests.skips import needs_chromium
from tests.systems.first_title import FirstTitle

NUM_QUESTIONS = 9
NAME = "first_title"


class Titles:
    """Finds, for question i, a passage of title i; every third question is answered by that."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        number = int(queries[0].split()[-1])
        return [[Hit(f"p{number}-{i}", 2.0 - i, f"Town {number + i}", "A <i>town</i>.") for i in range(top_k)]]


class Broken:
    """A search engine that is away."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        raise RetrievalError("the index is away.")


def _questions(num: int = NUM_QUESTIONS) -> list[Question]:
    """The questions of `write_artifacts`, with golds of their own."""
    return [
        Question(
            f"world-test-{i:04d}", "world", "test", f"Which town is it, number {i}", (f"town {i - i % 3}",),
            1 + i % 3, gold_passage_ids=(f"p{i}-0",), gold_method="annotated", gold_complete=True,
        )
        for i in range(num)
    ]  # fmt: skip


def _evaluate(scratch: Path, seed: int = 0) -> Evaluation:
    scratch.mkdir(parents=True, exist_ok=True)
    return evaluate(FirstTitle(Titles()), _questions(), True, NAME, seed, NUM_QUESTIONS, scratch)


def _add(artifacts: Path, seed: int, evaluation: Evaluation) -> None:
    """What the stages `train` and `evaluate` leave behind."""
    folder = artifacts / "evaluate" / f"{NAME}-{seed}"
    schema.write(folder / "scores.jsonl", evaluation.scores)
    schema.write(folder / "trajectories.jsonl", evaluation.trajectories)
    summary = {"policy": NAME, "seed": seed, "num_questions": NUM_QUESTIONS, "settings": {"kind": NAME}}
    write_system(artifacts, NAME, seed, is_trained=False, kind=NAME)
    played = systems.read(artifacts / "train" / f"{NAME}-{seed}").policy_sha256
    hashes = {"data_sha256": DATA, "policy_sha256": played, "config_sha256": "of the evaluation"}
    write_json(folder / "summary.json", summary | hashes)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start policy, a trained one and the system, each with two seeds."""
    root = tmp_path_factory.mktemp("run")
    made = write_artifacts(root, num_questions=NUM_QUESTIONS, steps=4, methods=("search_r1_grpo",))
    for seed in (0, 1):
        _add(made, seed, _evaluate(root / f"scratch-{seed}", seed))
    return made


@pytest.fixture(scope="module")
def results(artifacts: Path) -> Results:
    return build(artifacts, ("base", "search_r1_grpo", NAME), (0, 1), "base", 100, {NAME: "First title"})


def test_every_question_is_scored_in_both_modes(tmp_path: Path) -> None:
    found = _evaluate(tmp_path)
    assert len(found.scores) == 2 * NUM_QUESTIONS
    greedy = [row for row in found.scores if row.mode == "greedy"]
    assert [row.em for row in greedy] == [1.0, 0.0, 0.0] * 3
    assert {(row.searches, row.actions, row.valid_actions, row.recall) for row in greedy} == {(1, 2, 2, 1.0)}
    assert {(row.generated_tokens, row.prefill_tokens) for row in greedy} == {(0, 0)}


def test_rows_without_tokens_have_text_and_pass_the_expectations(artifacts: Path, tmp_path: Path) -> None:
    folder = artifacts / "evaluate" / f"{NAME}-0"
    check("results", [folder / "scores.jsonl"], tmp_path)
    check("trajectories", [folder / "trajectories.jsonl"], tmp_path)
    turns = [turn for _, row in read_jsonl(folder / "trajectories.jsonl") for turn in row["turns"]]
    assert all((turn["tokens"], turn["logprobs"], turn["advantages"]) == (None, None, None) for turn in turns)
    assert turns[1]["text"] == "<answer>Town 0</answer>"


def test_an_outage_ends_its_evaluation_too(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"Question world-test-0000: the index is away\. Mend the search"):
        evaluate(FirstTitle(Broken()), _questions(), False, NAME, 0, 3, tmp_path)


def test_it_stands_in_the_table_without_a_training_summary(results: Results) -> None:
    cell = results.find(NAME, "em")
    assert cell is not None
    assert cell.value == pytest.approx(1 / 3)
    assert results.find(NAME, "em_minus_base") is not None
    assert results.find(NAME, "steps", mode="training") is None
    assert "| First title | 2 | 9 | +0.222" in markdown(results)
    costs = markdown(results).split("## Training cost")[1].split("##")[0]
    assert "search_r1_grpo" in costs
    assert "First title" not in costs
    line = next(line for line in fitted(markdown(results), 200).splitlines() if line.startswith("First title"))
    assert line.split()[2:5] == ["2", "9", "+0.222"]
    row = next(line for line in markdown(results).splitlines() if line.startswith("| First title |"))
    assert row.endswith("|  |")  # It generates no tokens.


def test_a_system_that_learns_has_its_summary_in_the_table(tmp_path: Path) -> None:
    """Whatever plays: with a training summary beside it, costs and curves are shown."""
    made = write_artifacts(tmp_path, num_questions=NUM_QUESTIONS, steps=4, methods=(NAME,))
    _add(made, 0, _evaluate(tmp_path / "scratch"))
    write_system(made, NAME, 0, is_trained=True, kind=NAME)
    found = build(made, ("base", NAME), (0,), "base", 100)
    steps = found.find(NAME, "steps", mode="training")
    assert steps is not None
    assert steps.value == 4
    (made / "train" / f"{NAME}-0" / "summary.json").unlink()
    with pytest.raises(DataError, match=r"summary\.json: the file is missing"):
        build(made, ("base", NAME), (0,), "base", 100)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@needs_chromium
def test_the_viewer_shows_what_it_wrote_and_found(
    browser: Browser, artifacts: Path, results: Results, tmp_path: Path
) -> None:
    write_page(tmp_path / "index.html", results, artifacts)
    browser.problems.clear()
    browser.open(tmp_path / "index.html")
    choose(browser, 0, NAME)
    assert browser.run("[...document.querySelectorAll('.viewer .turn aside strong')].map(s => s.textContent)") == [
        "Turn 1",
        "Turn 2",
    ]
    blocks = browser.run("[...document.querySelectorAll('.viewer .block h4')].map(head => head.textContent)")
    assert blocks == ["think", "search", "information", "answer"]
    words = browser.run("[...document.querySelectorAll('.viewer .block .tokens')].map(box => box.textContent)")
    assert words[0] == "<think>What is <b>known</b>?</think>"  # Markup stays text.
    assert words[2].startswith("<answer>Town ")
    assert "tokens" not in text(browser, ".viewer .turn aside")
    assert browser.run("[...document.querySelectorAll('.viewer summary')].map(s => s.textContent)") == []  # No prompt.
    choose(browser, MODE, "training")
    assert text(browser, ".viewer .empty").startswith("No embedded trajectory")
    assert browser.problems == []
    assert browser.run("document.querySelectorAll('#cost tbody tr').length") == 3
