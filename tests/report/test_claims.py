"""Verdicts by hand for every kind of claim, what leaves them alone, and what turns them round."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate.statistics import Interval
from tasks.methods import composition, loader
from tasks.report import claims, tool
from tasks.report.artifacts import Run
from tasks.report.claims import (
    CLAIMS,
    HARMS,
    NOT_MEASURED,
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    UNDECIDED,
    findings,
    judge,
)
from tasks.report.repeats import Repeats, count, punishes
from tasks.report.study import complete
from tasks.report.table import markdown
from tasks.store import write_jsonl
from tests.report.small_study import Given, answer, small, validations
from tests.skips import SHARED, needs_shared

PAPERS = SHARED / "papers"
BY_ID = {claim.id: claim for claim in CLAIMS}
SEEDS = (0, 1, 2)
PENALTY_UNMOVED = "stepsearch_ow_penalty is its start policy in"


@pytest.mark.parametrize(
    ("low", "high", "side", "verdict"),
    [
        (0.01, 0.2, "more", REPRODUCED),
        (-0.2, -0.01, "more", NOT_REPRODUCED),
        (-0.1, 0.2, "more", UNDECIDED),
        (0.0, 0.2, "more", UNDECIDED),
        (-0.2, -0.01, "less", REPRODUCED),
        (0.01, 0.2, "less", NOT_REPRODUCED),
        (-0.1, 0.1, "less", UNDECIDED),
        (-0.019, 0.019, "no gain", REPRODUCED),
        (0.005, 0.015, "no gain", REPRODUCED),  # A certain gain, but below the margin.
        (-0.015, -0.005, "no gain", REPRODUCED),
        (-0.05, 0.019, "no gain", UNDECIDED),  # It may harm.
        (-0.3, -0.1, "no gain", HARMS),
        (-0.03, -0.01, "no gain", HARMS),
        (0.01, 0.2, "no gain", NOT_REPRODUCED),
        (-0.01, 0.02, "no gain", UNDECIDED),
        (math.nan, math.nan, "more", UNDECIDED),
    ],
)
def test_verdict_of_an_interval(low: float, high: float, side: claims.Side, verdict: str):
    middle = 0.0 if math.isnan(low) else (low + high) / 2
    assert judge(Interval(middle, low, high, 9), side, 3) == verdict
    assert judge(Interval(middle, low, high, 9), side, 1) == UNDECIDED


def test_nothing_measured_is_no_verdict():
    assert judge(None, "more", 3) == NOT_MEASURED
    assert judge(Interval(math.nan, math.nan, math.nan, 0), "more", 3) == NOT_MEASURED


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_swapped_policies_turn_a_verdict_round(one: float, other: float):
    low, high = sorted((one, other))
    turned = {REPRODUCED: NOT_REPRODUCED, NOT_REPRODUCED: REPRODUCED, UNDECIDED: UNDECIDED}
    verdict = judge(Interval(0.0, low, high, 5), "more", 2)
    assert judge(Interval(0.0, -high, -low, 5), "more", 2) == turned[verdict]
    assert judge(Interval(0.0, low, high, 5), "less", 2) == turned[verdict]


def runs(**ems: str) -> dict[str, Given]:
    """The same answers for each of the seeds."""
    return {f"{policy}-{seed}": Given(digits) for policy, digits in ems.items() for seed in SEEDS}


def verdicts(root: Path, given: dict[str, Given], seeds: tuple[int, ...] = SEEDS) -> dict[tuple[str, str], str]:
    results, trainings = small(root, given, seeds)
    return {(one.claim.id, one.measure.name): one.verdict for one in findings(results, trainings, 200)}


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        # All 20 questions differ by 1: at least 1 - 2 (1 - .025^(1/20)) = .663.
        ("1" * 20, "0" * 20, REPRODUCED),
        ("0" * 20, "1" * 20, NOT_REPRODUCED),
        # Of 4 questions the same says only that the mean is above 1 - 2 (1 - .025^(1/4)) = -.205.
        ("1111", "0000", UNDECIDED),
        ("10" * 10, "01" * 10, UNDECIDED),
    ],
)
def test_step_rewards_against_outcome_only(tmp_path: Path, ours: str, theirs: str, verdict: str):
    found = verdicts(tmp_path, runs(stepsearch=ours, ppo_f1=theirs))
    assert found["step_rewards_against_ppo", "f1"] == verdict
    assert found["step_rewards_against_ppo", "em"] == verdict
    assert found["step_rewards_against_ppo", "validation_em_at_budget"] == NOT_MEASURED
    assert found["step_rewards_against_grpo", "f1"] == NOT_MEASURED


@pytest.mark.parametrize(
    ("num_questions", "verdict"),
    # Equal answers: the interval ends at 1 - .025^(1/n): .0183 for 200 questions, .0362 for 100.
    [(200, REPRODUCED), (100, UNDECIDED)],
)
def test_a_penalty_that_changes_nothing_does_not_help(tmp_path: Path, num_questions: int, verdict: str):
    same = "01" * (num_questions // 2)
    assert verdicts(tmp_path, runs(stepsearch_ow_penalty=same, ppo_f1=same))["penalty_alone", "f1"] == verdict


def test_two_policies_that_answer_nothing_decide_nothing(tmp_path: Path):
    none = "0" * 200
    found = verdicts(tmp_path, runs(stepsearch_ow_penalty=none, ppo_f1=none, stepsearch=none))
    assert {found["penalty_alone", name] for name in ("f1", "em")} == {UNDECIDED}
    assert found["step_rewards_against_ppo", "f1"] == UNDECIDED


def test_a_policy_that_is_still_its_start_is_named(tmp_path: Path):
    given = runs(stepsearch_ow_penalty="1" * 20, ppo_f1="0" * 20)
    given |= {f"stepsearch_ow_penalty-{s}": Given("1" * 20, summary={"selected_step": s}) for s in SEEDS}
    results, _ = small(tmp_path, given, SEEDS)
    rows = complete(results, tmp_path / "artifacts", 200).sections[0].rows
    assert [row[2:5:2] for row in rows if "its start policy" in " ".join(row)] == [
        ["stepsearch_ow_penalty - ppo_f1: F1", f"{NOT_REPRODUCED}; {PENALTY_UNMOVED} 1 of 3 seeds"],
        ["stepsearch_ow_penalty - ppo_f1: EM", f"({NOT_REPRODUCED}; {PENALTY_UNMOVED} 1 of 3 seeds)"],
    ]


def test_a_verdict_on_a_policy_that_never_moved_says_so_and_curves_do_not(tmp_path: Path):
    """The judge is compared with exact match alone, which is its start in every seed: only its curve is of training."""
    curve = validations((0, 0.2), (90, 0.1))
    given = {f"slate-{s}": Given("1" * 20, curve, {"selected_step": 2}) for s in SEEDS}
    given |= {f"slate_em_only-{s}": Given("0" * 20, curve, {"selected_step": 0}) for s in SEEDS}
    results, _ = small(tmp_path, given, SEEDS)
    section = complete(results, tmp_path / "artifacts", 200).sections[0]
    found = {row[2]: row[4] for row in section.rows}
    unmoved = "slate_em_only is its start policy in 3 of 3 seeds"
    assert found["slate - slate_em_only: EM"] == f"{REPRODUCED}; {unmoved}"
    assert found["slate - slate_em_only: F1"] == f"({REPRODUCED}; {unmoved})"
    assert found["slate - slate_em_only: validation EM at equal tokens"] == f"({UNDECIDED})"
    assert found["slate - slate_k1"] == NOT_MEASURED
    assert "is one from what was there before it" in section.lead


def test_answers_take_the_wider_of_two_intervals(tmp_path: Path):
    """Gains of 1, 1 and .4: resampled alone .4 would be the least; Student: .8 -+ 4.303 * .3464 / sqrt(3) = .8606."""
    given = runs(dspo="1" * 20, gspo="0" * 20)
    given["dspo-2"] = Given("1" * 8 + "0" * 12)
    results, trainings = small(tmp_path, given, SEEDS)
    one = next(f for f in findings(results, trainings, 200) if f.claim.id == "filter" and f.measure.name == "em")
    assert one.difference is not None
    assert (one.difference.mean, one.difference.low) == pytest.approx((0.8, -0.0606), abs=1e-4)
    assert one.verdict == UNDECIDED


def test_a_collapse_is_no_absence_of_a_gain(tmp_path: Path):
    found = verdicts(tmp_path, runs(stepsearch_ow_penalty="0" * 20, ppo_f1="1" * 20))
    assert found["penalty_alone", "f1"] == HARMS


def test_a_penalty_that_helps_refutes_that_it_does_not(tmp_path: Path):
    found = verdicts(tmp_path, runs(stepsearch_ow_penalty="1" * 20, ppo_f1="0" * 20))
    assert found["penalty_alone", "f1"] == NOT_REPRODUCED


def test_searches_are_compared_by_their_counts(tmp_path: Path):
    """Each question takes 1 search instead of 4: of 20 equal differences of -3 in [-4, 4] the mean is below -1.6."""
    right = "1" * 20
    given = {f"slate-{s}": Given(right, searches="1" * 20) for s in SEEDS}
    given |= {f"slate_wo_bonus-{s}": Given(right, searches="4" * 20) for s in SEEDS}
    results, trainings = small(tmp_path, given, SEEDS)
    found = {f.measure.name: f for f in findings(results, trainings, 200, [BY_ID["early_bonus"]])}
    fewer = found["searches"].difference
    assert fewer is not None
    assert (fewer.mean, found["searches"].verdict) == (-3.0, REPRODUCED)
    assert -4.0 <= fewer.low < -3.0 < fewer.high < -1.0
    assert found["em"].verdict == UNDECIDED  # 20 equal answers may hide a difference of 2 points.


def test_a_gain_that_grows_with_hops_by_hand(tmp_path: Path):
    """Of 4 questions with 1 hop and 4 with 3 hops one more and 3, 4, 3 more are right: .5, .75, .5."""
    hops = "1111" + "3333"
    ours = ("1000" + "1110", "1000" + "1111", "1000" + "1110")
    given = {f"r_search-{s}": Given(ems, hops=hops) for s, ems in enumerate(ours)}
    given |= {f"r_search_wo_evidence-{s}": Given("0" * 8, hops=hops) for s in SEEDS}
    results, trainings = small(tmp_path, given, SEEDS)
    (one,) = findings(results, trainings, 200, [BY_ID["evidence_with_hops"]])
    assert one.difference is not None
    # Mean .58333, deviation .14434: 4.303 * .14434 / sqrt(3) = .35857.
    assert (one.difference.mean, one.difference.low) == pytest.approx((0.58333, 0.22476), abs=1e-4)
    assert one.verdict == REPRODUCED
    single = {name: replace(run, hops="1" * 8) for name, run in given.items()}
    results, trainings = small(tmp_path / "single", single, SEEDS)
    assert findings(results, trainings, 200, [BY_ID["evidence_with_hops"]])[0].verdict == NOT_MEASURED


@pytest.mark.parametrize(("plain", "verdict"), [("0" * 20, REPRODUCED), ("1" * 20, UNDECIDED)])
def test_evidence_is_judged_by_what_another_model_answers(tmp_path: Path, plain: str, verdict: str):
    results, _ = small(tmp_path, {f"r_search-{seed}": Given("1" * 20) for seed in SEEDS}, SEEDS)
    ems = {"plain search, 1 passage": plain, "agent's evidence": "1" * 20}
    for seed in SEEDS:
        rows = [
            {"question_id": f"q{i}", "hops": 1, "source": source, "answer": "x", "em": float(em), "f1": float(em)}
            for source, digits in ems.items()
            for i, em in enumerate(digits)
        ]
        write_jsonl(tmp_path / "artifacts" / "tool" / f"r_search-{seed}" / "answers.jsonl", rows)

    tools = tool.read(tmp_path / "artifacts", ["r_search"], SEEDS, 200)
    (one,) = [one for one in findings(results, (), 200, tools=tools) if one.claim.id == "evidence_as_tool"]
    assert one.verdict == verdict
    found = complete(results, tmp_path / "artifacts", 200, tools=tools)
    (cell,) = [cell for cell in found.cells if cell.metric == claims.READ_EM]
    assert (cell.policy, cell.value, cell.num_questions) == ("r_search - plain search", 1.0 - float(plain[0]), 20)
    (table,) = [section for section in found.sections if section.id == "tool"]
    assert [row[:4] for row in table.rows[:2]] == [["r_search", name, "all", "20"] for name in ems]

    (one,) = [one for one in findings(results, (), 200) if one.claim.id == "evidence_as_tool"]
    assert one.verdict == NOT_MEASURED


def test_one_seed_decides_nothing(tmp_path: Path):
    given = {"dspo-0": Given("1" * 20), "gspo-0": Given("0" * 20)}
    assert verdicts(tmp_path, given, (0,))["filter", "subem"] == UNDECIDED


def key_reward(*early: float) -> dict[str, Given]:
    """The key reward's runs reach `early` at 30 of 90 tokens and stay; PPO climbs evenly to 0.9."""
    found = {}
    for seed, em in enumerate(early):
        found[f"stepsearch_ow_key-{seed}"] = Given("0", validations((0, 0.0), (30, em), (90, em)))
        found[f"ppo_f1-{seed}"] = Given("0", validations((0, 0.0), (90, 0.9)))
    return found


def test_early_learning_by_hand(tmp_path: Path):
    # First third: em / 2 - .15. For .9 .8 .85: .3 .25 .275, mean .275 -+ 4.303 * .025 / sqrt(3) = .0621.
    results, trainings = small(tmp_path, key_reward(0.9, 0.8, 0.85), SEEDS)
    one = next(f for f in findings(results, trainings, 200) if f.claim.id == "key_reward_speeds")
    assert one.verdict == REPRODUCED
    assert one.difference is not None
    assert (one.difference.mean, one.difference.low) == pytest.approx((0.275, 0.2129), abs=1e-4)
    swapped = replace(one.claim, policy=one.claim.against, against=one.claim.policy)
    assert findings(results, trainings, 200, [swapped])[0].verdict == NOT_REPRODUCED


def test_two_seeds_of_the_same_leave_it_open(tmp_path: Path):
    # .3 .25: 12.706 * .03536 / sqrt(2) = .3177 to both sides of .275.
    found = verdicts(tmp_path, key_reward(0.9, 0.8), (0, 1))
    assert found["key_reward_speeds", "validation_em_area_early"] == UNDECIDED


def high_rate(drops: dict[str, tuple[float, ...]], stopped: tuple[str, ...] = ()) -> dict[str, Given]:
    """Runs that fall from 0.8 by a drop for each seed."""
    found = {}
    for policy, values in drops.items():
        for seed, value in enumerate(values):
            reason = {"step": 1, "reason": "reward fell"} if policy in stopped else None
            steps = validations((0, 0.2), (50, 0.8), (99, 0.8 - value))
            found[f"{policy}-{seed}"] = Given("01", steps, {"stopped": reason})
    return found


def test_stability_is_judged_by_the_drop_and_the_rest_is_shown(tmp_path: Path):
    drops = {"gspo_high_lr": (0.0, 0.1, 0.05), "grpo_subem_high_lr": (0.6, 0.7, 0.6)}
    results, trainings = small(tmp_path, high_rate(drops, ("grpo_subem_high_lr",)), SEEDS)
    found = {f.measure.name: f for f in findings(results, trainings, 200, [BY_ID["high_rate"]])}
    drop, stopped, spread = found["validation_em_drop"], found["stopped_share"], found["em_spread"]
    assert drop.difference is not None
    assert drop.difference.mean == pytest.approx(-0.58333, abs=1e-5)
    assert drop.verdict == REPRODUCED
    assert stopped.difference is not None
    assert stopped.difference.mean == -1.0
    assert stopped.verdict == UNDECIDED  # 3 of 3 against 0 of 3 is no certainty: up to -1 + 2 * .708.
    assert spread.difference is not None
    assert (spread.difference.mean, spread.verdict) == (0.0, UNDECIDED)
    text = markdown(complete(results, tmp_path / "artifacts", 200))
    assert "| gspo_high_lr - grpo_subem_high_lr: drop from best to last validation EM | -0.583 [" in text
    stops = "share of runs stopped by the collapse detector | -1.000 [-1.000, +0.415]"
    assert f"{stops} | (undecided at this scale) |" in text
    assert "| gspo_high_lr - grpo_subem_high_lr: standard deviation of EM over seeds | +0.000 | (" in text


def test_runs_that_do_not_tell_whether_they_were_stopped_are_not_counted(tmp_path: Path):
    found = verdicts(tmp_path, key_reward(0.9, 0.8, 0.85))
    assert found["key_reward_collapses", "stopped_share"] == NOT_MEASURED
    assert found["key_reward_collapses", "validation_em_drop"] == UNDECIDED  # No run falls.


def test_order_of_questions_and_seeds_does_not_matter(tmp_path: Path):
    given = {f"dspo-{s}": Given("1101110111") for s in SEEDS} | {f"gspo-{s}": Given("0101010101") for s in SEEDS}
    given["dspo-1"] = Given("1111111101")
    results, trainings = small(tmp_path / "a", given, SEEDS)
    other, _ = small(tmp_path / "b", dict(reversed(given.items())), SEEDS[::-1])
    turned = [replace(run, scores={mode: rows[::-1] for mode, rows in run.scores.items()}) for run in other.runs]
    assert findings(replace(other, runs=tuple(turned)), trainings, 200) == findings(results, trainings, 200)


def test_a_run_that_has_no_claim_to_judge_shows_none(tmp_path: Path):
    results, _ = small(tmp_path, runs(search_r1_ppo="1" * 20), SEEDS)
    assert "claims" not in {one.id for one in complete(results, tmp_path / "artifacts", 200).sections}


def test_every_claim_is_listed_and_each_difference_is_a_row_of_the_csv(tmp_path: Path):
    results, _ = small(tmp_path, runs(dspo="1" * 20, gspo="0" * 20), SEEDS)
    whole = complete(results, tmp_path / "artifacts", 200)
    section = whole.sections[0]
    assert [row[0] for row in section.rows if row[0]] == [claim.text for claim in CLAIMS]
    lines = {row[2]: row[3:5] for row in section.rows}
    assert lines["dspo - gspo: subEM"] == ["+1.000 [+0.663, +1.000]", REPRODUCED]
    assert lines["dspo - gspo: F1"][1] == f"({REPRODUCED})"
    assert lines["stepsearch - ppo_f1"] == ["", NOT_MEASURED]
    cells = [c for c in whole.cells if c.policy == "dspo - gspo"]
    assert [(c.metric, c.mode, c.value, c.num_questions) for c in cells] == [
        (name, "greedy", 1.0, 20) for name in ("subem", "em", "f1")
    ]
    assert cells[0].policy_sha256.split(";")[3] == "hash of gspo-0"
    keys = [(c.policy, c.seed, c.dataset, c.hops, c.mode, c.metric) for c in whole.cells]
    assert len(keys) == len(set(keys))


PUNISHED = {"settings": {"method": {"rewards": [{"kind": "answer"}, {"kind": "search_turns", "penalty": 1.0}]}}}


def penalty_study(root: Path, repeated: int, clean: int, at: str = "evaluate/base-1") -> list[list[str]]:
    """Claims of a run in which the penalty harms, where the start policy gives so many right answers of each kind."""
    given = runs(stepsearch_ow_penalty="0" * 20, ppo_f1="1" * 20, stepsearch="0" * 20, dspo="1" * 20, gspo="0" * 20)
    given |= {
        f"{name}-{s}": Given("0" * 20, (), PUNISHED) for name in ("stepsearch_ow_penalty", "stepsearch") for s in SEEDS
    }
    results, _ = small(root, given, SEEDS)
    step = 1 if at.startswith("train") else None
    rows = [answer("a", "b", "a", step=step, question=f"r{i}") for i in range(repeated)]
    rows += [answer("a", "b", step=step, question=f"c{i}") for i in range(clean)]
    rows += [answer("a"), answer("a", "a", said="wrong", step=step), answer("a", "b", said="wrong", step=step)]
    if step:
        rows += [answer("a", "b", step=2, question=f"l{i}") for i in range(50)]  # Of a policy that has learned.
    write_jsonl(root / "artifacts" / at / "trajectories.jsonl", rows)
    section = complete(results, root / "artifacts", 200).sections[0]
    return [*section.rows, [section.lead]]


@pytest.mark.parametrize("at", ["evaluate/base-1", "train/ppo_f1-0"])
def test_a_penalty_is_not_testable_where_the_start_policy_repeats_its_queries(tmp_path: Path, at: str):
    *rows, (lead,) = penalty_study(tmp_path, repeated=8, clean=2, at=at)
    verdicts = {row[2]: row[4] for row in rows}
    assert verdicts["stepsearch_ow_penalty - ppo_f1: F1"] == NOT_TESTABLE
    assert verdicts["stepsearch_ow_penalty - ppo_f1: EM"] == f"({NOT_TESTABLE})"
    assert verdicts["stepsearch - ppo_f1: F1"] == NOT_TESTABLE
    assert verdicts["dspo - gspo: subEM"] == REPRODUCED  # Nothing there punishes a repeat.
    assert "8 of 10 different right answers with two or more searches repeat a query word for word" in lead
    assert "and 1 of 2 wrong ones" in lead


def test_a_penalty_is_judged_where_the_start_policy_searches_cleanly(tmp_path: Path):
    *rows, (lead,) = penalty_study(tmp_path, repeated=5, clean=5)
    assert {row[2]: row[4] for row in rows}["stepsearch_ow_penalty - ppo_f1: F1"] == HARMS
    assert "5 of 10 different right answers" in lead
    assert "not testable" not in lead


def test_an_answer_that_two_methods_recorded_counts_once(tmp_path: Path):
    """Their first rollouts are equal where both start from the same policy: no more evidence than one method's."""
    results, _ = small(tmp_path, {f"{name}-{seed}": Given("0") for name in ("dspo", "gspo") for seed in (0, 1)})
    for name in ("dspo", "gspo"):
        for seed in (0, 1):
            rows = [answer("a", "b", "a", step=1), answer("a", "b", step=1), answer("a", "a", said="wrong", step=1)]
            own = [answer("c", "c", step=1)] if name == "gspo" else []  # A larger group draws one play more.
            path = tmp_path / "artifacts" / "train" / f"{name}-{seed}" / "trajectories.jsonl"
            write_jsonl(path, [row | {"seed": seed} for row in (*rows, *own)])
    # Of each seed: aba, ab and cc are right, aa is wrong.
    assert count(results, tmp_path / "artifacts") == Repeats(6, 4, 2, 2)


def test_the_penalty_is_found_in_the_real_configurations():
    names = ("ppo_f1", "grpo_f1", "stepsearch_ow_key", "stepsearch_wo_penalty", "stepsearch", "stepsearch_ow_penalty")
    trained = {name: {"settings": {"method": composition(loader.load(name, "laptop"))}} for name in names}
    punished = [name for name, training in trained.items() if punishes([Run(name, 0, {}, {}, training, "")])]
    assert punished == ["stepsearch", "stepsearch_ow_penalty"]


def test_what_no_paper_says_is_called_ours():
    """No paper of the two compares ratios at a raised learning rate."""
    assert [claim.id for claim in CLAIMS if claim.paper == claims.OURS] == ["high_rate"]


def test_a_claim_written_after_the_first_run_of_its_policies_says_so(tmp_path: Path):
    """Git's history has the dates; nothing else about a claim tells them."""
    late = {"penalty_with_gain", "sequence_ratios", "token_ratios_collapse", "evidence_as_tool"}
    assert {claim.id for claim in CLAIMS if claim.written == "after the first run"} == late
    seen = {claim.id for claim in CLAIMS if claim.written.startswith("after a run of one seed")}
    assert seen == {"reward_model_against_outcome"}
    learned = {claim.id for claim in CLAIMS if claim.paper.startswith(("PiCA", "SLATE", "R-Search"))}
    assert {claim.id for claim in CLAIMS if claim.written == claims.ONE_KNOWN} == learned - seen - late
    assert BY_ID["penalty_alone"].written == "before the first run, its rule later"
    results, _ = small(tmp_path, runs(dspo="1" * 20, gspo="0" * 20, dapo="0" * 20), SEEDS)
    section = complete(results, tmp_path / "artifacts", 200).sections[0]
    assert {row[0]: row[5] for row in section.rows if row[0]} == {claim.text: claim.written for claim in CLAIMS}
    assert "beforehand" not in section.lead


NAMED = {
    "ratio": "ratios",
    "low": "clip range",
    "high": "clip range",
    "aggregation": "mean",
    "overlong": "length penalty",
    "reference_kl": "KL term",
    "mixed_outcomes": "filter",
    "keep_all": "filter",
}
"""A part that only one of two methods has, or a setting in which they differ -> what a claim about them calls it."""


def scored(name: str) -> dict[str, dict[str, object]]:
    """The parts that turn a method's trajectories into a loss, by kind."""
    tree = loader.load(name, "laptop")
    return {part["kind"]: part for part in (tree["filter"], *tree["rewards"], *tree["losses"])}


@pytest.mark.parametrize("name", ["filter", "sequence_ratios", "token_ratios_collapse", "high_rate"])
def test_a_claim_names_everything_in_which_its_two_methods_differ(name: str):
    claim = BY_ID[name]
    one, other = scored(claim.policy), scored(claim.against)
    differing = one.keys() ^ other.keys()
    for kind in one.keys() & other.keys():
        differing |= {
            key for key in one[kind].keys() | other[kind].keys() if one[kind].get(key) != other[kind].get(key)
        }
    assert differing
    assert not [key for key in differing if NAMED[key] not in claim.text]


@needs_shared(PAPERS)
def test_a_claim_stands_in_the_paper_it_is_said_to_be_of():
    """Words of each claim, in the paper it names; what no paper says is called ours."""
    said = {
        "step_rewards_against_ppo": "outperforming both PPO and GRPO in final F1",
        "step_rewards_against_grpo": "outperforming both PPO and GRPO in final F1",
        "penalty_alone": "Redundancy penalty alone does not optimize the search ability",
        "penalty_with_gain": "it can force the model to perform high-quality, low-repetition effective search",
        "key_reward_speeds": "Searching keyword reward values can significantly improve the model convergence speed",
        "key_reward_collapses": "it may lead to hallucination and reward collapse problems more quickly",
        "filter": "removing the dynamic filter",
        "sequence_ratios": "ablating sequence-level optimization",
        "token_ratios_collapse": "suffer from catastrophic policy collapse early in training",
        "high_rate": None,
        "reward_model_against_outcome": "relative improvement over the outcome-only PPO baseline",
        "step_penalty_shortens": "the model curtails response length to minimize costs",
        "step_penalty_collapses": "performance collapse observed in the w/ F1+penalty model",
        "five_candidates": "Performance improves steadily from k=1k=1 to k=5k=5",
        "seven_candidates": "diminishing returns at k=7k=7",
        "truncation_adds": "truncated sampling yields gains above and beyond step-level rewards alone",
        "dense_rewards_add": "truncated sampling and dense rewards provide complementary benefits",
        "judge_against_rule": "removing dense rewards causes larger drops than removing truncated sampling",
        "early_bonus": "superfluous search queries",
        "evidence": "a clear performance drop without the evidence component",
        "evidence_with_hops": "especially pronounced on complex multi-hop datasets compared to single-hop",
        "grpo_against_ppo": "GRPO generally outperforms PPO",
        "evidence_as_tool": "applying the shareable evidence to downstream models",
    }
    assert said.keys() == BY_ID.keys()
    for name, words in said.items():
        if words is None:
            assert BY_ID[name].paper == claims.OURS
        else:
            paper = BY_ID[name].paper.partition(" ")[0].lower().replace("-", "_")
            assert words in (PAPERS / f"{paper}.txt").read_text(encoding="utf-8"), name


def test_claims_are_declared_once_and_say_what_they_measure():
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert {measure.name for measure in claim.measures} <= claims.NAMES.keys()
        assert len({measure.name for measure in claim.measures}) == len(claim.measures)
