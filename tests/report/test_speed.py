"""Speed and memory of training in the report: rates of all seeds, the share of a limit, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.report.page import page_data
from tasks.report.speed import rows
from tasks.report.table import build
from tests.report.browser import Browser
from tests.report.fake_artifacts import write_artifacts
from tests.skips import needs_chromium

METHOD = "search_r1_grpo"
LIMIT = {"device": "processor, 2 threads, float32", "flop_per_s": 1e11, "source": "measured"}
UNKNOWN = {"device": "Card 9, bfloat16", "flop_per_s": None, "source": "Card 9 is not in the table"}


def entry(times: float = 1, limit: Any = LIMIT, **memory: float) -> dict[str, Any]:
    """A training that wrote 200 tokens and read 600 in 10 s, and learned 90 of 1,800 in 30 s."""
    work = {
        "written": 200, "prefilled": 600, "play_s": 10 * times,
        "trained": 90, "read": 1800, "flop": 6e11, "learn_s": 30 * times,
    }  # fmt: skip
    return {"work": work, "limit": limit, "memory": {"stage_mb": 500.0} | memory}


def of(tmp_path: Path, *entries: dict[str, Any]) -> dict[str, Any]:
    """The rows of a method whose seeds have these entries in the ledger."""
    seeds = tuple(range(len(entries)))
    artifacts = write_artifacts(tmp_path, seeds, num_questions=6, steps=4, methods=(METHOD,))
    results = build(artifacts, ("base", METHOD), seeds, "base", 50)
    ledger = {f"train@{METHOD}-{seed}": found for seed, found in enumerate(entries)}
    shown = page_data(results, artifacts, ledger, {}, 2)["speed"]
    assert shown == rows(results, ledger)
    return dict(shown)


def test_rates_are_those_of_all_seeds_together(tmp_path: Path) -> None:
    """400 tokens in 10 + 30 s are 10 a second, where the mean of the seeds' rates would be 13.3."""
    found = of(tmp_path, entry(1, stage_mb=700.0), entry(3, largest_worker_mb=90.0))[METHOD]
    assert [found[name] for name in ("written", "prefilled")] == [400 / 40, 1200 / 40]
    assert [found[name] for name in ("trained", "read_in_learning")] == [180 / 120, 3600 / 120]
    assert found["flop_per_s"] == pytest.approx(12e11 / 120)
    # Each seed needs 6 s at the limit, and together they took 120 s.
    assert found["share"] == pytest.approx(12 / 120)
    assert found["memory"] == {"stage_mb": 700.0, "largest_worker_mb": 90.0}
    assert (found["devices"], found["sources"]) == (["processor, 2 threads, float32"], ["measured"])


def test_a_device_without_a_limit_has_no_share_and_its_name_is_shown(tmp_path: Path) -> None:
    found = of(tmp_path, entry(), entry(limit=UNKNOWN))[METHOD]
    assert (found["share"], found["limit"]) == (None, None)
    assert found["sources"] == ["measured", "Card 9 is not in the table"]
    engine_that_does_not_say = entry()
    del engine_that_does_not_say["limit"]
    assert of(tmp_path / "other", engine_that_does_not_say)[METHOD]["share"] is None


def test_a_seed_that_came_from_a_cache_leaves_the_system_out(tmp_path: Path) -> None:
    assert of(tmp_path, entry(), {}) == {}


@needs_chromium
def test_speed_and_memory_are_shown_under_cost(tmp_path: Path) -> None:
    from tasks.report.page import write_page

    artifacts = write_artifacts(tmp_path, (0,), num_questions=6, steps=4, methods=(METHOD, "dspo"))
    results = build(artifacts, ("base", METHOD, "dspo"), (0,), "base", 50)
    ledger = {f"train@{METHOD}-0": entry(sum_mb=1500.4), "train@dspo-0": entry(limit=UNKNOWN)}
    write_page(tmp_path / "x.html", results, artifacts, ledger)
    write_page(tmp_path / "none.html", results, artifacts)
    cells = "[...document.querySelectorAll('#cost .speed tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    with Browser(375, 900) as browser:
        browser.open(tmp_path / "x.html")
        of_method, of_dspo, memory, other_memory = browser.run(cells)
        assert of_method[1:] == ["20", "60", "3", "60", "20.0 G", "0.200of 100.0 G"]
        assert of_dspo[1:] == ["20", "60", "3", "60", "20.0 G", "unknown"]
        assert (memory[1:], other_memory[1:]) == (["500", "1,500"], ["500", "\u2013"])
        heads = "[...document.querySelectorAll('#cost .speed th')].map(c => c.textContent)"
        assert browser.run(heads)[-3:] == ["peak memory, MB", "stage", "stage and workers"]

        note = browser.run("document.querySelector('#cost .speed .note').textContent")
        assert "processor, 2 threads, float32; Card 9, bfloat16 (measured; Card 9 is not in the table)." in note
        assert browser.run("document.documentElement.scrollWidth") <= 375
        browser.open(tmp_path / "none.html")
        assert browser.run("document.querySelectorAll('.speed').length") == 0
        assert browser.problems == []
