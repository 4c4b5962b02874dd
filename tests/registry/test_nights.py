"""The alarms of a night, the night that the next one is compared with, and the trend."""

from pathlib import Path

import pytest

from tasks.registry import nights
from tasks.registry.nights import Cell, Played
from tasks.store import DataError


def _cell(policy: str = "slate-0 v1", em: float = 0.7, **changes: object) -> Cell:
    metrics = {"em": em, "f1": 0.8, "searches": 2.0}
    found = {name: [mean, mean - 0.04, mean + 0.04] for name, mean in metrics.items()}
    about = {"name": policy, "is_champion": changes.get("is_champion", False), "inputs": changes.get("inputs", "i")}
    return nights.cell(about, {**found, "scores_sha256": changes.get("outputs", f"{em}"), "num_questions": 600})


def _add(root: Path, *cells: Cell, at: str = "2026-11-23T03:00:00+00:00") -> list[str]:
    return nights.add(root, at, "abc", cells)[-1].alarms


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / nights.FOLDER).mkdir(parents=True)
    assert _add(tmp_path, _cell()) == [], "nothing to compare the first night with"
    return tmp_path


@pytest.mark.parametrize(
    ("cell", "alarm"),
    [
        (_cell(), None),
        (_cell(em=0.71, inputs="other"), None),  # Another index: within the interval.
        (_cell("new-0 v2", em=0.1), None),  # It plays for the first time.
        (_cell(outputs="other"), "slate-0 v1: the same policy, questions and index gave other answers or scores"),
        (_cell(em=0.71), "slate-0 v1: the same policy, questions and index gave other answers or scores (em 0.700 -> "),
        (_cell(em=0.6), "slate-0 v1: outside the interval of the last good night: em 0.700 [0.660, 0.740] -> 0.600"),
        (_cell(em=0.8, inputs="other"), "slate-0 v1: outside the interval of the last good night: em 0.700 [0.660, "),
    ],
)
def test_what_is_an_alarm(root: Path, cell: Cell, alarm: str | None) -> None:
    found = _add(root, cell)
    assert len(found) == (alarm is not None)
    assert all(text.startswith(str(alarm)) for text in found)


def test_each_metric_is_watched(root: Path) -> None:
    changed = _cell()
    changed.metrics["searches"] = Played(mean=4.0, low=3.9, high=4.1)
    (alarm,) = _add(root, changed)
    assert alarm.endswith("searches 2.000 [1.960, 2.040] -> 4.000")


def test_a_metric_without_an_interval_raises_no_alarm_and_shows_none() -> None:
    """Of so few questions that an interval would exclude nothing."""
    whole, narrow = Played(mean=0.5, low=None, high=None), Played(mean=0.5, low=0.4, high=0.6)
    assert (whole.shown, whole.is_outside(1.0)) == ("0.500", False)
    assert (narrow.shown, narrow.is_outside(0.7), narrow.is_outside(0.6)) == ("0.500 [0.400, 0.600]", True, False)


def test_a_bad_night_is_no_standard_until_somebody_accepts_it(root: Path) -> None:
    with pytest.raises(ValueError, match="no alarm that could be accepted"):
        nights.accept(root, "why not")
    assert _add(root, _cell(em=0.5))
    assert _add(root, _cell(em=0.5)), "compared with the last good night, not with the last one"
    assert not _add(root, _cell())
    assert _add(root, _cell(em=0.5))
    for reason in (" ", "two\nlines"):
        with pytest.raises(ValueError, match="expected one line of printable text"):
            nights.accept(root, reason)
    assert nights.accept(root, "the scorer strips | accents now").is_good
    lines = (root / nights.FOLDER / nights.TREND).read_text(encoding="utf-8").splitlines()
    assert lines[2].endswith(r"| alarm, accepted: the scorer strips \| accents now |")
    assert not _add(root, _cell(em=0.5))
    assert _add(root, _cell())


def test_the_trend_names_every_policy_and_alarm(root: Path) -> None:
    _add(root, _cell(em=0.6, is_champion=True), _cell("grpo-1 v2"), at="2026-11-24T03:00:00+00:00")
    lines = (root / nights.FOLDER / nights.TREND).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "| night (UTC) | grpo-1 v2 | slate-0 v1 (champion) | |"
    assert lines[2] == "| 2026-11-24 03:00 | 0.700 [0.660, 0.740] | 0.600 [0.560, 0.640] | **alarm** |"
    assert lines[3] == "| 2026-11-23 03:00 |  | 0.700 [0.660, 0.740] | no alarm |"
    assert lines[5].startswith("- slate-0 v1: outside the interval")
    plot = (root / nights.FOLDER / nights.PLOT).read_text(encoding="utf-8")
    assert "<svg" in plot
    assert "NaN" not in plot


def test_a_damaged_history_is_named(root: Path) -> None:
    path = root / nights.FOLDER / nights.HISTORY
    path.write_text(path.read_text(encoding="utf-8").replace('"alarms"', '"alarm"'), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"nights.jsonl: row 1: "):
        _add(root, _cell())
    assert path.read_bytes() == before
