"""Errors by kind and results by dataset and hops: numbers by hand, a stable sample, and what the page shows of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate.errors import KINDS, kind_of
from tasks.report import breakdown, errors
from tasks.report.errors import Error, sample
from tasks.report.page import write_page
from tasks.report.table import Results, build, markdown
from tasks.store import DataError, read_jsonl, write_jsonl
from tests.report.browser import Browser
from tests.report.fake_artifacts import HOSTILE, SYSTEMS, TITLES, write_artifacts
from tests.report.test_page import Outline
from tests.skips import needs_chromium

GRPO = "search_r1_grpo"


def test_counts_and_shares_are_those_of_the_rows(results: Results) -> None:
    counted = errors.counts(results)
    header, rows = errors.section(results).header, errors.section(results).rows
    for policy, row in zip(SYSTEMS, rows, strict=True):
        scores = [score for run in results.runs if run.policy == policy for score in run.scores["greedy"]]
        kinds = Counter(kind for score in scores if (kind := kind_of(score)))
        assert counted[policy] == {kind: kinds[kind] for kind in KINDS}
        wrong = sum(not score.em for score in scores)
        assert row[:3] == [results.title(policy), str(len(scores)), str(wrong)]
        shown = dict(zip(header[3:], row[3:], strict=True))
        assert shown["not read"] == f"{kinds['not_read']} ({kinds['not_read'] / wrong:.3f})"
        assert "failed" not in shown  # No system has one.


@pytest.fixture(scope="session")
def wrong(results: Results) -> list[Error]:
    return errors.found(results.runs, "base")


def _keys(drawn: list[Error]) -> list[tuple[int, str]]:
    return [(error.seed, error.score.question_id) for error in drawn]


def test_a_sample_is_stable_spread_and_prefers_what_can_be_read(wrong: list[Error]) -> None:
    chosen = sample(wrong, (), 12)
    assert len(set(_keys(chosen))) == 12
    assert _keys(sample(wrong[::-1], (), 12)) == _keys(chosen)  # Not the order of the rows decides.
    available, drawn = Counter(error.kind for error in wrong), Counter(error.kind for error in chosen)
    most = max(drawn.values())
    assert all(drawn[kind] >= min(available[kind], most - 1) for kind in available)
    assert [*drawn] == [kind for kind in KINDS if drawn[kind]]

    recorded = {(error.seed, error.score.question_id) for error in wrong if error.seed == 1}
    assert {error.seed for error in sample(wrong, recorded, 6)} == {1}
    few = {key for key in sorted(recorded) if key[1] < sorted(recorded)[len(recorded) // 2][1]}
    readable = [key in few for key in _keys(sample(wrong, few, 12))]
    assert readable.count(False) <= max(12 - len(few), len(available))  # At most one of a kind that has none to read.
    assert readable.count(True) >= min(12 - len(available), len(few))
    assert sample(wrong, (), 10_000) != wrong
    assert sorted(_keys(sample(wrong, (), 10_000))) == sorted(_keys(wrong))
    assert sample([], (), 5) == []


def test_a_sample_shows_other_questions_before_other_seeds(wrong: list[Error]) -> None:
    same = [replace(wrong[0], seed=seed) for seed in range(5)]
    others = [error for error in wrong if error.kind == wrong[0].kind and error.seed == 0][:3]
    chosen = sample([*same, *others], (), 3)
    assert len({error.score.question_id for error in chosen}) == 3


def test_listed_errors_are_embedded_and_have_their_texts(results: Results, artifacts: Path, tmp_path: Path) -> None:
    write_page(tmp_path / "index.html", results, artifacts, max_trajectories=30)
    data = json.loads(Outline((tmp_path / "index.html").read_text()).data)
    shown = {(t["policy"], t["seed"], t["question_id"], t["mode"]) for t in data["trajectories"]}
    listed = data["errors"]["sample"]
    assert Counter(one["policy"] for one in listed) == dict.fromkeys(SYSTEMS, errors.NUM_SAMPLED)
    assert all(one["is_recorded"] for one in listed)
    assert {(one["policy"], one["seed"], one["question_id"], "greedy") for one in listed} <= shown
    texts = {
        row["id"]: (row["question"], row["answers"]) for _, row in read_jsonl(artifacts / "data" / "questions.jsonl")
    }
    assert all((one["question"], one["answers"]) == texts[one["question_id"]] for one in listed)
    for one in data["trajectories"]:
        assert one["gold_words"] == [one["answers"][0].lower()]


def test_a_question_that_the_data_lacks_is_named(results: Results, artifacts: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "questions.jsonl", [])
    found = sample(errors.found(results.runs, "base"), (), 1)
    name = found[0].score.question_id
    with pytest.raises(DataError, match=f"questions.jsonl: question '{name}' is missing, which an evaluation played"):
        list(errors.example_rows(found, tmp_path / "questions.jsonl", {"base": set()}))


def test_a_part_has_a_line_for_each_policy_with_the_numbers_of_the_csv(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, num_questions=18, steps=3, datasets=("one", "two"))
    results = build(artifacts, SYSTEMS, (0, 1), "base", 50, TITLES)
    parts = [("one", "1"), ("one", "2"), ("one", "3"), ("two", "1"), ("two", "2"), ("two", "3")]
    assert list(breakdown.parts(results)) == parts
    rows = breakdown.section(results).rows
    assert [tuple(row[:2]) for row in rows] == [part for part in parts for _ in SYSTEMS]
    by_hand = [
        score
        for run in results.runs
        if run.policy == GRPO
        for score in run.scores["greedy"]
        if (score.dataset, score.hops) == ("two", 3)
    ]
    line = next(row for row in rows if row[:4] == ["two", "3", "3", "Search-R1-GRPO"])
    mean = sum(score.answer_in_passage or 0 for score in by_hand) / len(by_hand)
    assert line[6].startswith(f"{mean:.3f} [")
    assert line[9] == f"{sum(score.generated_tokens for score in by_hand) / len(by_hand):.0f}"


def test_one_dataset_has_its_parts_by_hops_under_its_name(results: Results) -> None:
    assert list(breakdown.parts(results)) == [("all", "1"), ("all", "2"), ("all", "3")]
    assert {row[0] for row in breakdown.section(results).rows} == {"world"}
    cell = results.find(GRPO, "answer_in_passage")
    assert cell is not None
    assert f"| {cell.value:.3f} |" in markdown(results)


# In a browser

LONG = "It is an old town with many gates. " * 12


def _read(row: dict[str, Any]) -> dict[str, Any]:
    """The trajectory with one long passage that holds its answers, one that holds neither, and a cut observation."""
    turn = next((turn for turn in row["turns"] if turn["hits"]), None)
    if turn is not None:
        gold, other = turn["hits"][:2]
        gold |= {"title": "Somewhere", "text": f"{LONG} The ({row['answers'][0]!s}), <b>not</b> {row['answer']}."}
        other |= {"title": "Ärøskøbing <i>x</i>", "text": f"{LONG}{row['answers'][0]}ish {'y' * 300}"}
        turn["observation"] = f"<information>{LONG}</information>"
    return row


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long")
    artifacts = write_artifacts(root, (0,), num_questions=24, steps=3)
    for path in artifacts.glob("evaluate/*/trajectories.jsonl"):
        write_jsonl(path, [_read(row) for _, row in read_jsonl(path)])
    write_page(root / "index.html", build(artifacts, SYSTEMS, (0,), "base", 50, TITLES), artifacts)
    return root / "index.html"


@needs_chromium
def test_an_error_leads_to_its_trajectory_with_answers_marked(browser: Browser, long_page: Path) -> None:
    browser.problems.clear()
    browser.open(long_page)
    items = "[...document.querySelectorAll('ol.errors li')]"
    item = f"{items}.find(li => li.textContent.includes('not read'))"
    question, expected = browser.run(
        f"[{item}.querySelector('.asked').textContent, {item}.querySelectorAll('q')[1].textContent]"
    )
    browser.run(f"{item}.querySelector('button').click()")
    assert browser.run("document.querySelector('.question').textContent") == question
    assert browser.run("document.querySelector('.verdict').textContent").startswith("\u2717 wrong")
    docs = "[...document.querySelectorAll('.doc')]"
    marks = browser.run(
        f"{docs}.slice(0, 2).map(d => [...d.querySelectorAll('mark')].map(m => [m.className, m.textContent]))"
    )
    assert ["expected", expected] in marks[0]  # Without the brackets around it.
    assert [kind for kind, _ in marks[0]] == ["expected", "given"]
    assert marks[1] == []  # A part of a word is no answer.
    assert browser.run(f"{docs}[0].textContent").startswith("goldholds the answer")
    # A long passage without the answer is folded, and opens.
    assert browser.run(f"{docs}.slice(0, 2).map(d => d.querySelector('p').className)") == ["", "folded"]
    tall = f"{docs}[1].querySelector('p').getBoundingClientRect().height"
    folded = browser.run(tall)
    browser.run(f"{docs}[1].querySelector('button').click()")
    assert browser.run(tall) > 2 * folded
    # Markup in a passage stays text.
    assert "<b>not</b>" in browser.run(f"{docs}[0].textContent")
    assert browser.run("document.querySelectorAll('.doc i').length") == 0
    assert browser.problems == []


@needs_chromium
def test_what_a_cut_observation_left_is_told(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    cut = "document.querySelector('.information details')"
    assert "What the policy was shown" in browser.run(f"{cut}.querySelector('summary').textContent")
    assert browser.run(f"{cut}.querySelector('p').textContent") == f"<information>{LONG}</information>"


@needs_chromium
def test_the_first_trajectory_is_a_right_one_of_several_searches(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    assert browser.run("document.querySelector('.verdict').textContent").startswith("\u2713 right")
    assert browser.run("document.querySelectorAll('.turn .block.search').length") > 1


@needs_chromium
def test_long_passages_fit_a_phone(browser: Browser, long_page: Path) -> None:
    browser.resize(390, 900)
    browser.open(long_page)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.run("document.querySelectorAll('.doc button[aria-expanded=false]').forEach(b => b.click())")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.resize(1200, 900)


@needs_chromium
def test_kinds_and_parts_are_drawn_and_a_part_opens_its_provenance(browser: Browser, page_of_two: Path) -> None:
    browser.open(page_of_two)
    assert browser.run("document.querySelectorAll('#errors .errorbar').length") == len(SYSTEMS)
    groups = "[...document.querySelectorAll('#parts tr.part')].map(r => r.textContent)"
    assert browser.run(groups)[0] == "one, 1 hop3 questions"
    assert len(browser.run(groups)) == 6
    browser.run(
        "(() => { const select = document.querySelector('#parts select'); select.value = 'two';"
        " select.dispatchEvent(new Event('change')); })()"
    )
    assert [group[:3] for group in browser.run(groups)] == ["two"] * 3
    browser.run("document.querySelector('#parts button.cell').click()")
    shown = browser.run("document.querySelector('dialog').textContent")
    assert "two, 1 hops" in shown
    assert HOSTILE not in shown


@pytest.fixture(scope="module")
def page_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    artifacts = write_artifacts(root, (0,), num_questions=18, steps=3, datasets=("one", "two"))
    write_page(root / "index.html", build(artifacts, SYSTEMS, (0,), "base", 50, TITLES), artifacts)
    return root / "index.html"
