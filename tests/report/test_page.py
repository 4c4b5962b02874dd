"""What the page embeds, that no text becomes markup, and how it behaves in a real browser."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.start_policy import KnownWords
from tasks.report.page import HERE, embed, read_curve, render, sample_trajectories, write_page
from tasks.report.printed import Printed
from tasks.report.study import complete
from tasks.report.table import Results, Section, build
from tasks.store import DataError, read_json, read_jsonl, write_json, write_jsonl
from tests.report.browser import Browser
from tests.report.fake_artifacts import CONFIG, HOSTILE, SYSTEMS, TITLES, ledger, write_artifacts
from tests.skips import needs_chromium

FACTS = {"data": "world", "model": "tiny"}


class Outline(HTMLParser):
    """Tags in order and the text of the data block, as a browser's parser would cut them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = ""
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data


@pytest.fixture(scope="session")
def page(results: Results, artifacts: Path) -> Path:
    path = artifacts.parent / "reports" / "index.html"
    write_page(path, results, artifacts, ledger((0, 1)), FACTS)
    return path


def test_page_holds_every_number_of_the_table(page: Path, results: Results):
    data = json.loads(Outline(page.read_text()).data)
    shown = {(c[0], c[1], c[5]): c[6] for c in data["cells"] if c[2] == c[3] == "all" and c[4] == "greedy"}
    for cell in results.cells:
        if cell.dataset == cell.hops == "all" and cell.mode == "greedy":
            assert shown[cell.policy, cell.seed, cell.metric] == cell.value


def test_every_run_has_its_provenance(page: Path, results: Results):
    data = json.loads(Outline(page.read_text()).data)
    for run in results.runs:
        found = data["provenance"][f"{run.policy}-{run.seed}"]
        assert found["policy_sha256"] == run.summary["policy_sha256"]
        assert found["data_sha256"]
        assert found["stages"][0]["command"] == f"dvc repro evaluate@{run.policy}-{run.seed}"
        assert found["stages"][0]["ledger"]["git_commit"]
        assert found["stages"][1]["ledger"]["mlflow_run_id"]
        trained = run.training["config_sha256"] if run.training else None
        assert [stage["config_sha256"] for stage in found["stages"]] == [run.summary["config_sha256"], trained]
        assert found["stages"][0]["plan"] == f"artifacts/plan/evaluate/{run.policy}-{run.seed}.json"
    stages = {stage["stage"]: stage["config_sha256"] for stage in data["data_stages"]}
    assert stages["recall"] == stages["retrievers"] == CONFIG["config_sha256"]
    assert stages["data"] is None  # It measures no number of the table.
    assert data["coverage"].startswith("over questions, resampled 200 times, with both seeds together; it does not")


def test_a_headline_about_single_seeds_says_what_their_interval_covers():
    """It says nothing about other training runs."""
    (sentence,) = re.findall(r"where = `[^`]*in each of [^`]*`", (HERE / "page.js").read_text(encoding="utf-8"))
    assert "by more than the interval over questions alone in each of" in sentence


def test_page_needs_nothing_from_outside(page: Path):
    html = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", html)
    assert "http://www.w3.org/2000/svg" in html  # A name, not an address; the only one.
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}


def test_page_works_without_a_ledger(results: Results, artifacts: Path, tmp_path: Path):
    write_page(tmp_path / "index.html", results, artifacts)
    data = json.loads(Outline((tmp_path / "index.html").read_text()).data)
    assert data["costs"][1]["seconds"] is None
    assert data["costs"][1]["generated_tokens"] > 0


def test_same_input_same_page(results: Results, artifacts: Path, tmp_path: Path):
    for name in ("a", "b"):
        write_page(tmp_path / name, results, artifacts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_text_survives_embedding_and_none_becomes_markup(value: object):
    text = embed(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


@pytest.mark.parametrize("text", [HOSTILE, "<!--", "]]>", "{{script}}", "\\u003c/script>", "\ud800"])
def test_data_cannot_leave_its_block(text: str):
    plain, planted = Outline(render({"a": "x"})), Outline(render({"a": text, text: 1}))
    assert planted.tags == plain.tags
    assert json.loads(planted.data) == {"a": text, text: 1}


def test_trajectories_are_bounded_spread_and_stable(artifacts: Path):
    paths = {seed: artifacts / "evaluate" / f"search_r1_grpo-{seed}" / "trajectories.jsonl" for seed in (0, 1)}
    chosen = sample_trajectories(paths, 24)
    assert len(chosen) == 24
    assert chosen == sample_trajectories(paths, 24)
    kinds = {(row.seed, row.mode, row.hops) for row in chosen}
    assert len(kinds) == 2 * 2 * 3
    assert {row.outcome for row in chosen} == {0.0, 1.0}
    assert len({(row.seed, row.mode, row.question_id) for row in chosen}) == 24


def test_policies_show_the_same_questions(artifacts: Path):
    shown = []
    for policy in ("base", "search_r1_grpo"):
        rows = sample_trajectories({0: artifacts / "evaluate" / f"{policy}-0" / "trajectories.jsonl"}, 30)
        shown.append({row.question_id for row in rows})
    assert len(shown[0] & shown[1]) >= 8


def test_a_short_file_gives_what_it_has(artifacts: Path, tmp_path: Path):
    rows = [row for _, row in read_jsonl(artifacts / "evaluate" / "base-0" / "trajectories.jsonl")]
    write_jsonl(tmp_path / "few.jsonl", rows[:5])
    assert len(sample_trajectories({0: tmp_path / "few.jsonl"}, 60)) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turns": None}, "turns: found None, expected a list"),
        ({"turns": [1]}, r"turns\[0\]: found 1 \(int\), expected a JSON object"),
        ({"prompt": 3}, r"prompt: found 3 \(int\), expected text"),
        ({"step": -1}, r"step: found -1 \(int\), expected 0 or more"),
        ({"mood": "greedy"}, "unknown field 'mood'"),
    ],
)
def test_malformed_trajectories_are_refused(artifacts: Path, tmp_path: Path, change: dict[str, object], words: str):
    rows = [row for _, row in read_jsonl(artifacts / "train" / "search_r1_ppo-0" / "trajectories.jsonl")]
    write_jsonl(tmp_path / "bad.jsonl", [rows[0], rows[1] | change])
    with pytest.raises(DataError, match=f"row 2: .*{words}|row 2: {words}"):
        sample_trajectories({0: tmp_path / "bad.jsonl"}, 10)


def test_advantages_must_be_one_a_token(artifacts: Path, tmp_path: Path):
    rows = [row for _, row in read_jsonl(artifacts / "train" / "search_r1_ppo-0" / "trajectories.jsonl")]
    rows[0]["turns"][0]["advantages"].pop()
    write_jsonl(tmp_path / "bad.jsonl", rows[:2])
    with pytest.raises(DataError, match=r"turns\[0\]: advantages: found \d+ values for \d+ tokens"):
        sample_trajectories({0: tmp_path / "bad.jsonl"}, 10)


def test_curves_are_thinned_but_keep_rare_points(tmp_path: Path):
    rare = {i: {"validation_em": 0.5} for i in range(97, 2001, 97)}
    rows = [{"step": i, "metrics": {"loss": i / 3} | rare.get(i, {})} for i in range(1, 2001)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    curve = read_curve(tmp_path / "metrics.jsonl")
    assert len(curve["step"]) < 500
    assert curve["step"][-1] == 2000
    assert sum(value is not None for value in curve["validation_em"]) == 20


def test_malformed_metrics_are_refused(tmp_path: Path):
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "metrics": {"loss": "low"}}])
    with pytest.raises(DataError, match=r"row 1: metrics\.loss: found 'low', expected a number"):
        read_curve(tmp_path / "metrics.jsonl")


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"(document.querySelector({json.dumps(selector)}) || {{}}).textContent || ''"))


MODE, HOPS = 2, 4  # Places of the viewer's selects.


def choose(browser: Browser, place: int, value: str) -> None:
    browser.run(
        f"(() => {{ const select = document.querySelectorAll('.viewer select')[{place}];"
        f" select.value = {json.dumps(value)}; select.dispatchEvent(new Event('change')); }})()"
    )


@needs_chromium
def test_page_draws_everything_without_a_complaint(browser: Browser, page: Path):
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page)
    sections = browser.run("[...document.querySelectorAll('section')].map(s => s.id)")
    assert sections[:7] == ["results", "hops", "parts", "claims", "learning", "errors", "trajectories"]
    assert sections[7:] == ["health", "cost", "data", "provenance-list"]
    assert "make compare trains them" in text(browser, "#claims")
    assert browser.run("document.querySelectorAll('svg.plot path.mean').length") > 20
    label = browser.run("document.querySelector('#hops svg.plot').getAttribute('aria-label')")
    assert label.startswith("Exact match by number of hops, with intervals")
    assert "Entropy nats a token" in browser.run("[...document.querySelectorAll('h3')].map(h => h.textContent)")
    assert browser.problems == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []


@pytest.fixture(scope="module")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every further table, of policies some claims speak of."""
    root, methods = tmp_path_factory.mktemp("study"), ("dspo", "gspo", "search_r1_ppo")
    artifacts = write_artifacts(root, (0, 1, 2), num_questions=20, steps=24, methods=methods)
    rows = [Printed("dspo", "DSPO", "1", "7B", HOSTILE, "Avg", "subem", 0.531)]
    results = build(artifacts, ("base", *methods), (0, 1, 2), "base", 100, {"gspo": HOSTILE})
    whole = complete(results, artifacts, 100, rows)
    later = Section("made-later", "Of a module that the page does not know", "Lead.", ["policy", "value"], [["a", "1"]])
    line = {"policy": "dspo", "points": [[0.1, 0.2, 0.1, 0.3], [0.9, 0.8, 0.7, 0.9]]}
    calibration = Section(
        "reward-models", "Reward models", "Lead.", ["model"], [["x"]], [line], ("f", "right answers"), True
    )
    write_page(root / "index.html", replace(whole, sections=(*whole.sections, calibration, later)), artifacts)
    return root / "index.html"


@needs_chromium
def test_claims_budget_health_and_printed_numbers_are_drawn(browser: Browser, study_page: Path):
    browser.problems.clear()
    browser.open(study_page)
    sections = browser.run("[...document.querySelectorAll('section')].map(s => s.id)")
    assert sections[2:7] == ["parts", "claims", "learning", "budget", "reward-models"]
    assert sections[7:12] == ["errors", "trajectories", "health", "health-table", "signal"]
    assert sections[12:15] == ["pairs", "made-later", "printed"]
    assert browser.run("document.querySelectorAll('#reward-models .diagonal').length") == 1
    assert browser.run("document.querySelectorAll('#budget .diagonal').length") == 0
    lines = browser.run(
        "[...document.querySelectorAll('#claims tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    about = [line for line in lines if line[2].startswith("dspo - ")]
    assert [line[2] for line in about][:2] == [f"dspo - {HOSTILE}: subEM", f"dspo - {HOSTILE}: EM"]
    assert re.fullmatch(r"[+-]0\.\d{3} \[[+-]0\.\d{3}, [+-]0\.\d{3}\]", about[0][3])
    assert sum(line[4] == "not measured in this run" for line in lines) == 22
    assert browser.run("document.querySelectorAll('#budget path.mean').length") == 3
    assert browser.run("document.querySelectorAll('#budget path.band').length") == 3
    assert "paper, other scale: DSPO, Table 1, 7B" in text(browser, "#printed")
    assert "entropy" in text(browser, "#health-table thead")
    assert re.findall(r"\S+%|\S+ points", text(browser, "main").replace("95%", "")) == ["7 points"], "a curve is smooth"
    assert browser.run("window.hacked") is None
    assert browser.problems == []
    browser.resize(390, 900)
    browser.open(study_page)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.resize(1200, 900)


@needs_chromium
def test_compared_retrievers_and_rejected_rows_are_shown(browser: Browser, page: Path):
    browser.open(page)
    assert text(browser, "#data .note.down") == "Data: faulty rows: 3 (1 damaged_gzip, 2 not_utf8)."
    heads = "[...document.querySelectorAll('#data .card h3')].filter(h => h.textContent.startsWith('Retrievers'))"
    cards = f"{heads}.map(h => h.parentNode)"
    assert browser.run(f"{cards}.length") == 1
    lines = browser.run(
        f"[...{cards}[0].querySelectorAll('tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert [line[:3] for line in lines] == [
        ["world", name, "40"] for name in ("bm25", "dense", "hybrid", "dense - bm25")
    ]
    assert lines[1][3] == "0.8200.800 \u2013 0.835"
    assert lines[3][3] == "\u22120.030\u22120.050 \u2013 +0.015"
    browser.run(f"{cards}[0].querySelector('button.cell').click()")
    shown = text(browser, "dialog")
    assert shown.startswith("bm25: recall@3")
    assert "dvc repro retrievers" in shown
    assert "dvc repro index" not in shown


@needs_chromium
def test_viewer_steps_with_keys_and_buttons(browser: Browser, page: Path):
    browser.open(page)
    choose(browser, HOPS, "")
    browser.run("document.querySelector('#trajectories').scrollIntoView({behavior: 'instant'})")
    seen = [text(browser, ".count")]
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
        seen.append(text(browser, ".count"))
    total = seen[0].split()[-1]
    assert seen == [f"{i} of {total}" for i in (1, 2, 3, 2)]
    question = text(browser, ".question")
    browser.run("document.querySelector('[aria-label=\"Next question\"]').click()")
    assert text(browser, ".count").startswith("3 of")
    assert text(browser, ".question") != question
    choose(browser, MODE, "training")
    assert browser.run("[...document.querySelectorAll('.tokens span')].some(s => s.style.background.includes('rgba'))")
    assert text(browser, ".turn aside").startswith("Turn 1")


@needs_chromium
def test_a_heading_sorts_its_table_and_seeds_stay_with_their_policy(browser: Browser, page: Path):
    browser.open(page)
    assert browser.run("document.querySelector('#results .check input').checked")  # Two seeds are shown as they come.
    names = "[...document.querySelectorAll('#results tbody tr')].map(r => r.children[0].textContent)"
    seeds, before = ["seed 0", "seed 1"], browser.run(names)
    assert before == ["base", *seeds, "Search-R1-PPO", *seeds, "Search-R1-GRPO", *seeds]
    lines = "[...document.querySelectorAll('#results tbody tr:not(.seedrow)')]"
    column = f"{lines}.map(r => parseFloat(r.children[3].textContent))"
    for order in ("descending", "ascending"):
        browser.run("document.querySelectorAll('#results th')[3].click()")
        assert browser.run("document.querySelectorAll('#results th')[3].getAttribute('aria-sort')") == order
        assert browser.run(column) == sorted(browser.run(column), reverse=order == "descending")
        assert browser.run(names)[1:3] == browser.run(names)[4:6] == seeds
    assert sorted(browser.run(names)) == sorted(before)


@needs_chromium
def test_the_papers_numbers_are_folded_and_the_bar_is_short(browser: Browser, study_page: Path):
    browser.open(study_page)
    assert browser.run("document.querySelector('#printed details').open") is False
    links = browser.run("[...document.querySelectorAll('#nav a')].map(a => a.getAttribute('href'))")
    sections = browser.run("[...document.querySelectorAll('section')].map(s => s.id)")
    assert links == [f"#{one}" for one in sections if one not in ("parts", "health-table", "signal")]


@needs_chromium
def test_an_opening_tag_stands_in_the_block_it_opens(browser: Browser, page: Path):
    """The tokens of the made-up policy carry the space before a tag, as those of many tokenizers do."""
    browser.open(page)
    choose(browser, MODE, "training")
    blocks = browser.run(
        "[...document.querySelectorAll('.turn .block:not(.information)')]"
        ".map(b => [b.querySelector('h4').textContent, b.querySelector('.tokens, p').textContent.trim()])"
    )
    assert {name for name, _ in blocks} >= {"think", "search"}
    assert not [block for block in blocks if block[0] == "outside any tag"]
    assert all(text.startswith(f"<{name}>") for name, text in blocks if name in ("think", "search", "answer"))


@needs_chromium
def test_a_tag_can_be_read_on_a_saturated_colour(browser: Browser, page: Path):
    browser.open(page)
    choose(browser, MODE, "training")
    colours = browser.run(
        "[...document.querySelectorAll('.tokens span.tag')].filter(s => s.style.background)"
        ".map(s => [getComputedStyle(s).color, getComputedStyle(s.parentNode).color])"
    )
    assert colours
    assert all(tag == text for tag, text in colours)


@needs_chromium
def test_labels_of_an_axis_differ_from_one_another(browser: Browser, tmp_path: Path):
    """An importance ratio between 0.998 and 1.001 needs more digits than a loss."""
    artifacts = write_artifacts(tmp_path, num_questions=6, steps=6)
    for path in artifacts.glob("train/*/metrics.jsonl"):
        rows = [row for _, row in read_jsonl(path)]
        for i, row in enumerate(rows):
            row["metrics"]["ratio_mean"] = 0.998 + 0.0005 * i
        write_jsonl(path, rows)
    write_page(tmp_path / "index.html", build(artifacts, SYSTEMS, (0, 1), "base", 50), artifacts)
    browser.open(tmp_path / "index.html")
    charts = browser.run(
        "[...document.querySelectorAll('svg.plot')].map(p => [...p.querySelectorAll('.ytick')].map(t => t.textContent))"
    )
    drawn = [labels for labels in charts if labels]
    assert len(drawn) > 10
    for labels in drawn:
        assert len(set(labels)) == len(labels)
        assert len({len(label.partition(".")[2]) for label in labels if label[-1].isdigit() and "e" not in label}) <= 1


@needs_chromium
def test_hovering_a_token_tells_its_advantage(browser: Browser, page: Path):
    browser.open(page)
    choose(browser, MODE, "training")
    at = browser.run(
        "(() => { const token = document.querySelectorAll('.tokens span')[2];"
        " token.scrollIntoView({block: 'center', behavior: 'instant'}); const box = token.getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    browser.move(at[0] - 1, at[1])
    browser.move(*at)
    assert re.search(r'token ".+"\nadvantage -?\d\.\d{4}\nlogprob', text(browser, "#tip"))


@needs_chromium
def test_a_number_shows_where_it_comes_from(browser: Browser, page: Path, results: Results):
    browser.open(page)
    browser.run("document.querySelector('#results button.cell').click()")
    shown = text(browser, "dialog")
    assert browser.run("document.querySelector('dialog').open") is True
    assert "dvc repro evaluate@base-0" in shown
    assert results.runs[0].summary["policy_sha256"] in shown
    assert f"{CONFIG['config_sha256']} is the hash of those in artifacts/plan/evaluate/base-0.json" in shown
    assert "over questions, resampled 200 times, with both seeds together" in shown
    assert "4f6f0d9c1b7a" in shown
    assert "torch 2.13.0+cpu, numpy 2.3.5" in shown
    assert "object" not in shown.lower().replace("objective", "")


@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_page_fits_its_window(browser: Browser, page: Path, width: int):
    browser.resize(width, 900)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.resize(1200, 900)


@needs_chromium
def test_numbers_come_first_on_a_phone(browser: Browser, page: Path):
    def shows(selector: str) -> bool:
        return bool(browser.run(f"document.querySelector({json.dumps(selector)}).offsetParent !== null"))

    browser.resize(400, 900)
    browser.open(page)
    assert not shows("#results td.wide")
    for place in (1, 2):  # The difference of exact match to base, and exact match.
        right = f"[...document.querySelectorAll('#results tr:nth-child(4) button.cell')].at({place - 1})"
        assert browser.run(f"{right}.getBoundingClientRect().right") <= 400
    assert shows("#results .hint")
    assert browser.run("document.querySelector('#hops .scroll').scrollWidth") <= 400
    browser.resize(1200, 900)
    browser.open(page)
    assert shows("#results td.wide")
    assert not shows("#results .hint")


@needs_chromium
@pytest.mark.parametrize("width", [1200, 400])
def test_labels_of_a_breakdown_end_left_of_its_zero(browser: Browser, page: Path, width: int):
    browser.resize(width, 900)
    browser.open(page)
    labels = "[...document.querySelectorAll('#hops svg.plot text:not([text-anchor])')].map(t => t.getBBox())"
    zero = browser.run("document.querySelector('#hops svg.plot line.gridline').x1.baseVal.value")
    assert (
        0 < browser.run(f"Math.max(...{labels}.map(box => box.x + box.width))") < zero - 8
    )  # A dot at 0% reaches 6 to the left.
    browser.resize(1200, 900)


def _page_of(
    tmp_path: Path, right: dict[str, int], note: str = "", failed: bool = False, seeds: tuple[int, ...] = (0,),
    validation_split: str = "dev", manifest: dict[str, str] | None = None, more: tuple[int, int] = (0, 5),
) -> Path:  # fmt: skip
    """A page of 30 questions of the split test; each policy answers the first `right`, `more` with each further seed.

    Of `more` the first is that of the start policy, the second that of all others. Every trained policy is that of the
    best step on the validation split.
    """
    artifacts = write_artifacts(tmp_path, seeds=seeds, num_questions=30, steps=3)
    for path in artifacts.glob("train/*/summary.json"):
        write_json(path, read_json(path) | {"settings": {"train": {"select": "best"}}})
    for policy, seed in itertools.product(right, seeds):
        count = right[policy] + seed * more[policy != "base"]
        path = artifacts / "evaluate" / f"{policy}-{seed}" / "scores.jsonl"
        rows = [row for _, row in read_jsonl(path)]
        for i, row in enumerate(rows):
            row["em"] = float(i // 2 < count)  # Two modes a question.
            row["status"] = "failed" if failed and i == len(rows) - 2 else "answered"
        write_jsonl(path, rows)
    found = build(artifacts, SYSTEMS, seeds, "base", 200, TITLES)
    notes, described = (note,) if note else (), {**found.manifest, **(manifest or {})}
    found = replace(found, validation_split=validation_split, notes=notes, manifest=described)
    write_page(tmp_path / "index.html", found, artifacts)
    return tmp_path / "index.html"


GRPO_BEST = "Search-R1-GRPO has exact match 0.900 on 30 held-out questions, 0.800 above base."
CLOSE = "above base; Search-R1-PPO lies within its interval."
TIE = "Search-R1-PPO and Search-R1-GRPO each have exact match 0.900 on 30 held-out questions; base has 0.100."
NONE_ABOVE = "Nothing is above base by more than its interval, on 30 held-out questions."


@needs_chromium
@pytest.mark.parametrize(
    ("base", "ppo", "grpo", "sentence"),
    [
        (0, 0, 0, NONE_ABOVE),
        (9, 10, 9, NONE_ABOVE),
        (20, 3, 5, NONE_ABOVE),
        (3, 21, 27, GRPO_BEST),
        (3, 26, 27, GRPO_BEST.replace("above base.", CLOSE)),
        (3, 27, 27, TIE),
    ],
)
def test_the_headline_names_a_winner_only_where_there_is_one(
    browser: Browser, tmp_path: Path, base: int, ppo: int, grpo: int, sentence: str
):
    browser.open(_page_of(tmp_path, {"base": base, "search_r1_ppo": ppo, "search_r1_grpo": grpo}))
    assert text(browser, "h1") == sentence
    assert text(browser, ".warning") == ""


@needs_chromium
def test_the_headline_of_two_seeds_names_who_is_above_in_each(browser: Browser, tmp_path: Path):
    """By the paired differences of each seed, with their intervals over questions; both seeds stand in the table."""
    browser.open(_page_of(tmp_path, {"base": 3, "search_r1_ppo": 18, "search_r1_grpo": 3}, seeds=(0, 1)))
    assert text(browser, "h1") == (
        "Search-R1-PPO is above base by more than the interval over questions alone in each of 2 seeds (EM +0.583), on "
        "30 held-out questions."
    )
    lines = browser.run("[...document.querySelectorAll('#results tbody tr')].map(r => r.children[2].textContent)")
    assert [line[:6] for line in lines[3:6]] == ["+0.583", "+0.500", "+0.667"]  # Both seeds, then each.
    heads = browser.run("[...document.querySelectorAll('#results th')].map(h => h.textContent)")
    assert heads[2:5] == ["EM \u2212 base", "EM", "F1"]
    assert "%" not in browser.run("document.querySelector('main').innerText.replaceAll('95%', '')")


@needs_chromium
def test_a_gain_that_every_seed_has_is_not_put_in_doubt_by_seeds_that_lie_far_apart(browser: Browser, tmp_path: Path):
    """Exact match is 1/3, 2/3 and 1, so its interval would hold every system; the gain over base is 1/3 each time."""
    right = {"base": 0, "search_r1_ppo": 5, "search_r1_grpo": 10}
    browser.open(_page_of(tmp_path, right, seeds=(0, 1, 2), more=(10, 10)))
    assert text(browser, "h1") == GRPO_BEST.replace("0.900", "0.667").replace("0.800", "0.333")


@needs_chromium
@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_the_page_shows_no_interval_that_holds_everything(browser: Browser, tmp_path: Path, seeds: tuple[int, ...]):
    """Two questions, one right in turn: no bar over the whole width, no headline, and no complaint of the script."""
    artifacts = write_artifacts(tmp_path, seeds=seeds, num_questions=2, steps=3)
    for path in artifacts.glob("evaluate/*/scores.jsonl"):
        rows = [row for _, row in read_jsonl(path)]
        flips = (int(path.parent.name[-1]) + path.parent.name.startswith("base")) % 2
        for i, row in enumerate(rows):
            row |= {name: float(i // 2 % 2 == flips) for name in ("em", "f1", "subem", "answer_in_passage")}
        write_jsonl(path, rows)
    write_page(tmp_path / "index.html", build(artifacts, SYSTEMS, seeds, "base", 200, TITLES), artifacts)
    browser.problems.clear()
    browser.open(tmp_path / "index.html")
    shown = browser.run("document.querySelector('main').innerText + document.querySelector('main').innerHTML")
    assert "0.500" in shown
    for whole in ("0.000 \u2013 1.000", "\u22121.000 \u2013 +1.000", "interval 0.000 to 1.000"):
        assert whole not in shown
    assert text(browser, "h1").startswith("Nothing is above base")
    assert browser.problems == []


@needs_chromium
def test_the_validations_of_a_seed_are_connected(browser: Browser, page: Path):
    browser.open(page)
    charts = "[...document.querySelectorAll('#learning svg.plot')]"
    assert browser.run(f"{charts}.map(c => c.querySelectorAll('path.between').length)") == [0, 4]  # Two of two seeds.
    drawn = f"[...{charts}[1].querySelectorAll('path.between')]"
    lengths = browser.run(drawn + ".map(p => p.getAttribute('d').match(/L/g).length)")
    dots = browser.run(f"{charts}[1].querySelectorAll('circle').length")
    assert sum(count + 1 for count in lengths) == dots


@needs_chromium
def test_cards_of_one_section_do_not_touch(browser: Browser, page: Path):
    browser.open(page)
    boxes = browser.run(
        "[...document.querySelectorAll('section')].map(s => [...s.querySelectorAll('.card')]"
        ".map(c => c.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom]))"
    )
    pairs = [pair for cards in boxes for pair in itertools.combinations(cards, 2)]
    near = [(a, b) for a, b in pairs if a[0] < b[2] and b[0] < a[2] and -1 < b[1] - a[3] < 8]
    assert len(pairs) > 10
    assert near == []


@needs_chromium
def test_notes_failed_searches_and_questions_that_chose_are_said(browser: Browser, tmp_path: Path):
    note = KnownWords(questions=0.634, passages=0.5).sentence()
    page = _page_of(tmp_path, {"search_r1_ppo": 4}, note, failed=True, validation_split="test")
    browser.open(page)
    assert text(browser, ".warning") == note
    assert not re.search("[0-9]%| points", note)
    assert text(browser, ".warning + .warning").startswith(
        "30 of 30 questions are of the split test, on which the best"
    )
    assert "30 questions" in text(browser, "h1")
    assert "held-out" not in text(browser, "h1")
    assert browser.run("document.querySelector('.warning').getBoundingClientRect().bottom") < 900
    assert text(browser, "#results .note.down") == (
        "Failed searches: Search-R1-PPO 0.033 of questions. They count as wrong."
    )


@needs_chromium
@pytest.mark.parametrize("seeds", [(0,), (0, 1)], ids=str)
def test_the_headline_names_the_splits_of_ones_own_questions(browser: Browser, tmp_path: Path, seeds: tuple[int, ...]):
    right = {"base": 3, "search_r1_ppo": 18, "search_r1_grpo": 3}
    browser.open(_page_of(tmp_path, right, seeds=seeds, manifest={"kind": "folder"}))
    assert "30 held-out questions (test of world)" in text(browser, "h1")


@needs_chromium
def test_hostile_text_stays_text(browser: Browser, tmp_path: Path):
    artifacts = write_artifacts(tmp_path, num_questions=9, steps=4, hostile=True)
    found = build(artifacts, SYSTEMS, (0, 1), "base", 100, {**TITLES, "search_r1_ppo": HOSTILE})
    write_page(tmp_path / "index.html", found, artifacts, facts={"data": HOSTILE})
    browser.problems.clear()
    browser.requests.clear()
    browser.open(tmp_path / "index.html")
    for mode in ("training", "sampled", "greedy"):
        choose(browser, MODE, mode)
        assert HOSTILE in text(browser, ".question")
        assert HOSTILE in text(browser, ".doc b")
        assert HOSTILE in text(browser, ".doc p")
    assert HOSTILE in text(browser, "ol.errors .asked")
    assert HOSTILE in text(browser, "ol.errors q:last-of-type")
    browser.run("document.querySelector('ol.errors button').click()")
    assert HOSTILE in text(browser, ".verdict mark.expected")
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert browser.problems == []
    assert len(browser.requests) == 1
