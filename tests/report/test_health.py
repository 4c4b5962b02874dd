"""The last third of training, how runs ended, and groups without a signal; what is absent is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.report import health
from tasks.store import DataError
from tests.report.small_study import Given, small

GROUPS = {"settings": {"method": {"sampler": {"kind": "independent_group", "size": 5}}}}
ALONE = {"settings": {"method": {"sampler": {"kind": "independent_group", "size": 1}}}}


def steps(**columns: list[float]) -> list[dict[str, Any]]:
    """Step 0 without metrics, then one step for each value."""
    length = len(next(iter(columns.values())))
    return [{}, *({name: values[i] for name, values in columns.items()} for i in range(length))]


def test_the_last_third_is_averaged_over_seeds(tmp_path: Path):
    first = steps(
        entropy=[9, 9, 9, 9, 0.2, 0.4], share_with_signal=[1, 1, 1, 1, 0.5, 0.7], logprob_gap_max=[9, 0, 0, 0, 1, 3]
    )
    second = steps(
        entropy=[9, 9, 9, 9, 0.6, 0.8], share_with_signal=[1, 1, 1, 1, 0.1, 0.1], logprob_gap_max=[9, 0, 0, 0, 2, 5],
        missing_scores_mean=[9, 9, 9, 9, 0.1, 0.2],
    )  # fmt: skip
    stop = {"stopped": {"step": 6, "reason": "entropy below 0.01"}, "selected_step": 4}
    runs = {
        "grpo-0": Given("1", first, GROUPS | {"stopped": None, "selected_step": 6}),
        "grpo-1": Given("1", second, GROUPS | stop),
        "ppo-0": Given("1", first, ALONE),
        "ppo-1": Given("1", second, ALONE),
    }
    results, trainings = small(tmp_path, runs)
    found = health.section(results, trainings)
    assert found is not None
    assert found.header == ["policy", "entropy", "share with signal", "logprob gap max",
                            "missing scores mean", "stopped", "selected step"]  # fmt: skip
    stopped = "1 of 2 (seed 1 at step 6: entropy below 0.01)"
    # Means of .2 .4 .6 .8, of .5 .7 .1 .1, and of the largest gaps, 3 and 5.
    assert found.rows[0] == ["grpo", "0.5", "0.35", "4", "0.15", stopped, "6, 4"]
    assert found.rows[1] == ["ppo", "0.5", "", "4", "0.15", "", ""]


def test_groups_without_a_signal_by_hand(tmp_path: Path):
    # First third: .2 .4 .3, half 4.303 * .1 / sqrt(3) = .248; last: .5 .9 .7, half .497, cut at 1; change: .3 .5 .4.
    runs = {
        "grpo-0": Given("1", steps(share_with_signal=[0.8, 0.7, 0.5]), GROUPS),
        "grpo-1": Given("1", steps(share_with_signal=[0.6, 0.7, 0.1]), GROUPS),
        "grpo-2": Given("1", steps(share_with_signal=[0.7, 0.7, 0.3]), GROUPS),
        **{f"ppo-{seed}": Given("1", steps(share_with_signal=[0.0, 0.0, 0.0]), ALONE) for seed in range(3)},
    }
    results, trainings = small(tmp_path, runs, seeds=range(3))
    found = health.signal_section(results, trainings)
    assert found is not None
    assert found.rows == [["grpo", "0.300 [0.052, 0.548]", "0.700 [0.203, 1.000]", "+0.400 [+0.152, +0.648]"]]


def test_evidence_by_hand(tmp_path: Path):
    # First step .9 .7, mean .8; the last third is one step of three.
    first = steps(evidence_verbatim_mean=[0.9, 0.1, 0.5], evidence_f1_mean=[0.25, 0.5, 0.75])
    second = steps(evidence_verbatim_mean=[0.7, 0.1, 0.5], evidence_f1_mean=[0.25, 0.5, 0.75])
    runs = {
        "grpo-0": Given("1", steps(entropy=[1, 1, 1]), GROUPS),
        "grpo-1": Given("1", steps(entropy=[1, 1, 1]), GROUPS),
        "r_search-0": Given("1", first, GROUPS),
        "r_search-1": Given("1", second, GROUPS),
    }
    results, trainings = small(tmp_path, runs)
    found = health.evidence_section(results, trainings)
    assert found is not None
    assert found.header[1:] == [
        "word for word, first step", "word for word, last third", "reader's F1, first step", "reader's F1, last third"
    ]  # fmt: skip
    assert [row[0] for row in found.rows] == ["r_search"]
    assert found.rows[0][1] == "0.800"  # Two seeds have no interval over seeds.
    assert [cell.split()[0] for cell in found.rows[0][2:]] == ["0.500", "0.250", "0.750"]


def test_older_runs_have_what_they_have(tmp_path: Path):
    results, trainings = small(tmp_path, {"a-0": Given("1"), "a-1": Given("1")})
    found = health.section(results, trainings)
    assert found is not None
    assert found.header == ["policy", "stopped", "selected step"]
    assert found.rows == [["a", "", ""]]
    assert health.signal_section(results, trainings) is None
    assert health.evidence_section(results, trainings) is None


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"stopped": "yes"}, r"summary\.json: stopped='yes', expected null or"),
        ({"stopped": {"step": 3}}, "stopped={'step': 3}, expected"),
        ({"selected_step": 1.5}, r"selected_step=1\.5, expected null or an integer"),
    ],
)
def test_a_malformed_end_is_refused(tmp_path: Path, summary: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        small(tmp_path, {"a-0": Given("1", (), summary), "a-1": Given("1")})
