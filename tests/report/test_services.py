"""The cost of services in the report: work from the training's summary, seconds and hits from the ledger."""

from __future__ import annotations

from pathlib import Path

from tasks.clock import PARTS
from tasks.report.page import page_data
from tasks.report.services import rows
from tasks.report.table import build
from tasks.store import read_json, write_json
from tests.report.browser import Browser
from tests.report.fake_artifacts import ledger, write_artifacts
from tests.skips import needs_chromium

METHOD = "search_r1_grpo"


def _artifacts(root: Path) -> Path:
    """Two seeds of a method with a judge."""
    artifacts = write_artifacts(root, (0, 1), num_questions=6, steps=4, methods=(METHOD,))
    for seed in (0, 1):
        path = artifacts / "train" / f"{METHOD}-{seed}" / "summary.json"
        used = {"judge": {"calls": 100 + 20 * seed, "tokens": 9000, "failures": seed}}
        write_json(path, read_json(path) | {"services": used})
    return artifacts


def test_work_is_a_mean_over_seeds_and_seconds_need_every_seed(tmp_path: Path) -> None:
    artifacts = _artifacts(tmp_path)
    results = build(artifacts, ("base", METHOD), (0, 1), "base", 50)
    entries = ledger((0, 1))
    for seed, hits in ((0, 10), (1, 30)):
        entries[f"train@{METHOD}-{seed}"]["services"] = {"judge": {"hits": hits, "seconds": 2.0 + seed}}

    whose = {"who": METHOD, "stage": "training", "role": "judge"}
    assert page_data(results, artifacts, entries, {}, 2)["services"] == [
        {**whose, "calls": 110.0, "tokens": 9000.0, "failures": 0.5, "hits": 20.0, "seconds": 2.5}
    ]
    del entries[f"train@{METHOD}-1"]
    (judge,) = page_data(results, artifacts, entries, {}, 2)["services"]
    assert (judge["calls"], judge["hits"], judge["seconds"]) == (110.0, None, None)


def test_every_stage_that_asks_a_service_has_a_row(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, (0,), num_questions=6, steps=4, methods=(METHOD,))
    used = {"chat": {"calls": 7, "tokens": 70, "failures": 1}}
    path = artifacts / "evaluate" / "base-0" / "summary.json"
    write_json(path, read_json(path) | {"services": used})
    write_json(artifacts / "trajectories" / "pica-0" / "summary.json", {"plays": 4})
    write_json(artifacts / "labels" / "pica-0" / "summary.json", {"services": {"labeller": used["chat"]}})
    write_json(artifacts / "quality" / "pica-0" / "summary.json", {"services": {"labeller": used["chat"]}})
    write_json(artifacts / "tool" / f"{METHOD}-0" / "summary.json", {"services": {"reader": used["chat"]}})
    path = artifacts / "augment" / "summary.json"
    write_json(path, read_json(path) | {"services": used})
    results = build(artifacts, ("base", METHOD), (0,), "base", 50)
    measured = {"labels@pica-0": {"services": {"labeller": {"hits": 5, "seconds": 2.0}}}}
    counts = {"calls": 7.0, "tokens": 70.0, "failures": 1.0}
    made = {"trajectories": ["pica"], "labels": ["pica"], "reward_quality": ["pica"], "tool": [METHOD]}
    unknown = {"hits": None, "seconds": None}
    assert rows(results, made, artifacts, measured) == [
        {"who": "sub-questions", "stage": "augmentation", "role": "chat", **counts, **unknown},
        {"who": "base", "stage": "evaluation", "role": "chat", **counts, **unknown},
        {"who": "pica", "stage": "its labels", "role": "labeller", **counts, "hits": 5.0, "seconds": 2.0},
        {"who": "pica", "stage": "its figures on other policies", "role": "labeller", **counts, **unknown},
        {"who": METHOD, "stage": "its evidence as a tool", "role": "reader", **counts, **unknown},
    ]


@needs_chromium
def test_the_cost_table_of_services_is_drawn_where_there_are_any(tmp_path: Path) -> None:
    from tasks.report.page import write_page

    artifacts = _artifacts(tmp_path)
    write_page(tmp_path / "x.html", build(artifacts, ("base", METHOD), (0, 1), "base", 50), artifacts)
    write_page(tmp_path / "none.html", build(artifacts, ("base",), (0, 1), "base", 50), artifacts)
    with Browser(375, 900) as browser:
        browser.open(tmp_path / "x.html")
        cells = "[...document.querySelectorAll('.services tbody td')].map(c => c.textContent)"
        assert browser.run(cells) == [METHOD, "training", "judge", "110", "9.0k", "0.500", "\u2013", "\u2013"]
        assert browser.run("document.documentElement.scrollWidth") <= 375
        browser.open(tmp_path / "none.html")
        assert browser.run("document.querySelectorAll('.services').length") == 0
        assert browser.problems == []


def test_seconds_of_training_are_shown_where_the_ledger_has_every_seed(tmp_path: Path) -> None:
    artifacts = write_artifacts(tmp_path, (0, 1), num_questions=6, steps=4, methods=(METHOD,))
    results = build(artifacts, ("base", METHOD), (0, 1), "base", 50)
    one = {f"train@{METHOD}-0": {"step_seconds": {"play": 1.0, "learn": 2.0}}}
    both = one | {f"train@{METHOD}-1": {"step_seconds": {"play": 3.0, "search": 8.0}}}
    assert page_data(results, artifacts, one, {}, 2)["step_seconds"]["policies"] == {}
    found = page_data(results, artifacts, both, {}, 2)["step_seconds"]
    assert [part for part, *_ in found["parts"]] == list(PARTS)
    means = dict.fromkeys(PARTS, 0.0) | {"play": 2.0, "learn": 1.0, "search": 4.0}
    assert found["policies"] == {METHOD: means}


@needs_chromium
def test_seconds_of_training_are_drawn_to_scale(tmp_path: Path) -> None:
    from tasks.report.page import write_page

    artifacts = write_artifacts(tmp_path, (0,), num_questions=6, steps=4, methods=(METHOD, "dspo"))
    results = build(artifacts, ("base", METHOD, "dspo"), (0,), "base", 50)
    seconds = {METHOD: {"play": 30.0, "learn": 10.0}, "dspo": {"play": 5.0, "save": 15.0}}
    ledger = {f"train@{method}-0": {"step_seconds": taken} for method, taken in seconds.items()}
    write_page(tmp_path / "x.html", results, artifacts, ledger)
    write_page(tmp_path / "none.html", results, artifacts)
    with Browser(375, 900) as browser:
        browser.open(tmp_path / "x.html")
        widths = (
            "[...document.querySelectorAll('.steps svg')].map(b => [...b.children].map(r => +r.getAttribute('width')))"
        )
        assert browser.run(widths) == [[750, 250], [125, 375]]
        names = "[...document.querySelectorAll('.steps .legend > span')].map(c => c.textContent)"
        assert browser.run(names) == ["play", "learning", "saving"]
        assert browser.run("document.documentElement.scrollWidth") <= 375
        browser.open(tmp_path / "none.html")
        assert browser.run("document.querySelectorAll('.steps').length") == 0
        assert browser.problems == []
