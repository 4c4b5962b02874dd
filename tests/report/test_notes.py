"""The viewer shows what rewards noted: curves, reasons, candidates that were not taken, and where evidence is from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.report.page import sample_trajectories, write_page
from tasks.report.table import build
from tasks.store import DataError, read_jsonl, write_jsonl
from tests.report.browser import Browser
from tests.report.fake_artifacts import HOSTILE, write_artifacts
from tests.skips import needs_chromium

METHOD = "search_r1_grpo"
EVIDENCE = f"<original_evidence>The capital of Avenor is Bristow, said nobody{HOSTILE}.</original_evidence>"


def _noted(row: dict[str, Any]) -> dict[str, Any]:
    """A row with two turns or more, as three methods would note it."""
    last = len(row["turns"]) - 1
    row["turns"][last] |= {
        "tokens": None,
        "advantages": None,
        "logprobs": None,
        "text": f"{EVIDENCE} <answer>x</answer>",
    }
    row["turns"][0]["hits"][0] |= {"title": "Avenor", "text": f"Bristow is the capital of Avenor{HOSTILE}."}
    judged = {"turn": 0, "name": "judge of the query", "value": -1.0, "text": f"Too vague{HOSTILE}."}
    taken = {"turn": 0, "name": "candidate", "value": 0.5, "text": "<search>Avenor</search>", "taken": True}
    left = {"turn": 0, "name": "candidate", "value": -0.5, "text": f"<search>{HOSTILE}</search>", "taken": False}
    curve = [{"turn": turn, "name": "f", "value": 0.2 + 0.1 * turn} for turn in range(-1, last + 1)]
    later = [one | {"turn": 1} for one in (left, left, taken)]
    return row | {"notes": [*curve, judged, left, taken, *later]}


def _untagged(row: dict[str, Any]) -> dict[str, Any]:
    """The row in a grammar without a tag for thoughts; its answer is wrong, and is paid a little."""
    for turn in row["turns"]:
        turn |= {"kind": "search", "tokens": None, "advantages": None, "logprobs": None}
        turn |= {"text": "so <search>x</search>"}
    return row | {"answer": "certainly not", "outcome": 0.4}


@pytest.fixture(scope="module")
def noted_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("notes")
    artifacts = write_artifacts(root, (0,), num_questions=12, steps=6, methods=(METHOD,))
    path = artifacts / "train" / f"{METHOD}-0" / "trajectories.jsonl"
    rows = [row for _, row in read_jsonl(path)]
    write_jsonl(path, [_noted(row) if row["hops"] < 3 else _untagged(row) for row in rows])
    write_page(root / "index.html", build(artifacts, ("base", METHOD), (0,), "base", 50), artifacts)
    return root / "index.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def _show(browser: Browser, page: Path, hops: str = "2") -> None:
    """Open the viewer at a training trajectory."""
    browser.problems.clear()
    browser.open(page)
    for place, value in ((2, "training"), (4, hops)):
        browser.run(
            f"(() => {{ const select = document.querySelectorAll('.viewer select')[{place}];"
            f" select.value = {json.dumps(value)}; select.dispatchEvent(new Event('change')); }})()"
        )


def _texts(browser: Browser, selector: str) -> list[str]:
    found = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")
    return [str(text) for text in found]


@needs_chromium
def test_values_of_one_name_are_a_curve_and_texts_stand_beside_their_turn(browser: Browser, noted_page: Path) -> None:
    _show(browser, noted_page)
    assert _texts(browser, ".curves figcaption") == ["f over the turns"]
    label = browser.run("document.querySelector('.curves svg').getAttribute('aria-label')")
    assert label.startswith("f: question 0.100, turn 1 0.200, turn 2 0.300")
    assert browser.run("document.querySelectorAll('.curves circle').length") == len(_texts(browser, ".turn")) + 1
    assert _texts(browser, ".turn .remark") == [f"judge of the query -1 Too vague{HOSTILE}."]
    assert "f 0.200" in _texts(browser, ".turn aside")[0]
    assert browser.problems == []
    assert browser.run("window.hacked") is None


@needs_chromium
def test_the_candidates_that_were_not_taken_are_shown_with_their_rewards(browser: Browser, noted_page: Path) -> None:
    _show(browser, noted_page)
    assert _texts(browser, ".choices h4") == ["2 candidates for this turn", "3 candidates for this turn"]
    assert _texts(browser, ".choice")[:2] == [
        "taken0.500<search>Avenor</search>",
        f"not taken-0.500<search>{HOSTILE}</search>",
    ]


@needs_chromium
def test_right_is_who_answers_right_and_thoughts_need_no_tag(browser: Browser, noted_page: Path) -> None:
    _show(browser, noted_page, hops="3")
    assert _texts(browser, ".verdict .pill")[:3] == ["\u2717 wrong", "outcome 0.400", "said: certainly not"]
    assert set(_texts(browser, ".turn .block.think h4")) == {"thought"}
    assert _texts(browser, ".turn .block.other") == []


@needs_chromium
def test_evidence_stands_beside_its_passages_and_shared_words_are_marked(browser: Browser, noted_page: Path) -> None:
    _show(browser, noted_page)
    found = _texts(browser, ".evidence mark")
    assert found[:3] == ["capital", "Avenor", "Bristow"]
    assert not {"nobody", "said", "the"} & set(found)
    (sources,) = _texts(browser, ".beside .sources")
    assert "Bristow is the capital of Avenor" in sources
    marks = set(_texts(browser, ".sources mark"))
    assert {"Bristow", "capital", "Avenor"} <= marks
    assert not marks & {"is", "the", "of"}


@needs_chromium
@pytest.mark.parametrize("width", [375, 1200])
def test_a_noted_trajectory_fits_its_window(browser: Browser, noted_page: Path, width: int) -> None:
    browser.resize(width, 900)
    _show(browser, noted_page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    boxes = browser.run(
        "[...document.querySelectorAll('.curves svg, .choice, .beside > .block, .remark')]"
        ".map(n => { const b = n.getBoundingClientRect(); return [b.left, b.right, b.width]; })"
    )
    assert len(boxes) >= 6
    assert all(left >= 0 and right <= width and wide > 100 for left, right, wide in boxes)
    browser.resize(1200, 900)


def test_a_note_of_a_turn_that_the_row_lacks_is_refused(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, (0,), num_questions=6, steps=2, methods=(METHOD,))
    path = artifacts / "train" / f"{METHOD}-0" / "trajectories.jsonl"
    rows = [row for _, row in read_jsonl(path)]
    rows[0]["notes"] = [{"turn": len(rows[0]["turns"]), "name": "f", "value": 0.5}]
    write_jsonl(path, rows[:1])
    with pytest.raises(DataError, match=r"row 1: notes\[0\]: found turn \d, expected -1 to \d"):
        sample_trajectories({0: path}, 10)
