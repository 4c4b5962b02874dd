"""Claims of the papers about this family of methods, judged on the artifacts of this run.

Each claim names two policies and one or more measures. The first measure gives the verdict of the claim. The others are
all shown, each with a verdict of its own. Each claim says whether it was written before the first run of its policies:
one that was written later could be chosen by what it would say. The intervals of all claims became wider after that
run. A verdict needs at least three seeds, and is not corrected for the number of claims. No verdict says anything about
a paper's method at the paper's own scale.

A difference is always `policy - against`. Intervals are those of the result table (`tasks.evaluate.statistics`); a
measure with a single number for each seed has Student's t alone.

* `more` (or `less`): reproduced if its whole 95% interval lies above (below) 0, not reproduced if the whole
  interval lies on the other side.
* `no gain`: reproduced if the whole interval lies within `MARGIN` of 0, on both sides; not reproduced if all of it
  lies above 0 and it reaches beyond the margin; "harms" if all of it lies below 0 and it reaches beyond the margin.

Everything else is undecided at this scale. So are measures of answers where neither policy answers any question right.
A claim about a penalty on repeated documents is not testable with a start policy that repeats a query in most
of its right answers (`tasks.report.repeats`).

One statement is not judged. DSPO (section 1) says that groups of search tasks often have homogeneous outcomes. It does
not say which share counts as often. A limit of our own would be met by construction: a quarter of all questions has one
hop, the start policy answers nearly all of them, and a group that always succeeds has no signal. `tasks.report.health`
shows the shares.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from tasks.data.notes import own_split
from tasks.evaluate.statistics import MIN_SEEDS, Interval, bootstrap_means, differences, over_seeds
from tasks.report import curves
from tasks.report.artifacts import Run
from tasks.report.curves import Window, seeds_note
from tasks.report.repeats import Repeats, punishes
from tasks.report.table import ALL, METRICS, Cell, Results, Section, of_interval, origin
from tasks.report.training import TrainingRun
from tasks.tool import gains
from tasks.tool.gains import EVIDENCE, Gain

MARGIN = 0.02
"""Differences of less than 0.02 count as no difference."""
REPRODUCED, NOT_REPRODUCED, HARMS = "reproduced", "not reproduced", "harms"
UNDECIDED, NOT_MEASURED = "undecided at this scale", "not measured in this run"
NOT_TESTABLE = "not testable with this start policy"

Side = Literal["more", "less", "no gain"]
Written = Literal[
    "before the first run",
    "before the first run, its rule later",
    "after one of the two policies was first run",
    "after a run of one seed, whose results were not looked at",
    "after the first run",
]
ONE_KNOWN: Written = "after one of the two policies was first run"

SEARCHES, HOPS_GAIN, READ_EM = "searches", "f1_gain_of_hops", "em_of_reader"
PLAIN_SEARCH = "plain search"
"""Stands for the best plain search where a claim compares what another model reads."""
PLAYED = ("f1", "em", "subem", SEARCHES)  # Paired on seed and question.
STOPPED, SPREAD = "stopped_share", "em_spread"
OF_CHECKPOINTS = (*PLAYED, SPREAD, HOPS_GAIN, READ_EM)  # What a run ends with; all others are read from its training.
NAMES = {
    SEARCHES: "searches per question",
    HOPS_GAIN: "F1 gain with two hops or more, minus that with one",
    READ_EM: "EM of another model that reads",
    "f1": "F1",
    "em": "EM",
    "subem": "subEM",
    curves.AT_BUDGET: "validation EM at equal tokens",
    curves.AREA: "area under the validation curve",
    curves.EARLY_AREA: "area under the validation curve, first third of the token budget",
    curves.DROP: "drop from best to last validation EM",
    STOPPED: "share of runs stopped by the collapse detector",
    SPREAD: "standard deviation of EM over seeds",
}


@dataclass(frozen=True)
class Measure:
    """What is measured, and on which side of 0 the claim wants `policy - against`."""

    name: str
    side: Side


@dataclass(frozen=True)
class Claim:
    """One statement of a paper: `policy` is said to differ from `against`; the first measure decides.

    Attributes:
        id: its name.
        paper: the paper and the place in it; `OURS` for a statement that no paper makes.
        text: the statement.
        policy, against: systems; `PLAIN_SEARCH` is none.
        measures: what is measured.
        written: whether claim, measures and rule were here before the two policies were first run.
    """

    id: str
    paper: str
    text: str
    policy: str
    against: str
    measures: tuple[Measure, ...]
    written: Written

    @property
    def systems(self) -> set[str]:
        """The systems that a run must have to judge the claim."""
        return {self.policy, self.against} - {PLAIN_SEARCH}


def _all(side: Side, *names: str) -> tuple[Measure, ...]:
    return tuple(Measure(name, side) for name in names)


OURS = "no paper; a question of this project"
STEPSEARCH, DSPO = "StepSearch (arXiv:2505.15107)", "DSPO (arXiv:2510.09255)"
PICA, SLATE, R_SEARCH = "PiCA (arXiv:2605.09287)", "SLATE (arXiv:2602.23440)", "R-Search (arXiv:2506.04185)"

_DAPO = "beside its ratios, DAPO has another clip range, a mean over tokens, no KL term and a length penalty"

CLAIMS = (
    Claim(
        "step_rewards_against_ppo",
        f"{STEPSEARCH}, section 4.1 and Table 2",
        "Step rewards answer better than PPO with the answer's reward alone.",
        "stepsearch",
        "ppo_f1",
        _all("more", "f1", "em", curves.AT_BUDGET),
        "before the first run",
    ),
    Claim(
        "step_rewards_against_grpo",
        f"{STEPSEARCH}, section 4.1 and Table 2",
        "Step rewards answer better than GRPO with the answer's reward alone.",
        "stepsearch",
        "grpo_f1",
        _all("more", "f1", "em", curves.AT_BUDGET),
        "before the first run",
    ),
    Claim(
        "penalty_alone",
        f"{STEPSEARCH}, section 4.2",
        f"The redundancy penalty alone does not improve the search (no difference of {MARGIN}, a "
        "limit of ours: in the paper's Table 3 it gains 0.029 of F1 over PPO, 3B).",
        "stepsearch_ow_penalty",
        "ppo_f1",
        _all("no gain", "f1", "em"),
        "before the first run, its rule later",
    ),
    Claim(
        "penalty_with_gain",
        f"{STEPSEARCH}, section 4.2 and Table 3",
        "Beside the information gain the redundancy penalty helps (without it the paper's 7B model loses 0.048 of F1).",
        "stepsearch",
        "stepsearch_wo_penalty",
        _all("more", "f1", "em", curves.AT_BUDGET),
        "after the first run",
    ),
    Claim(
        "key_reward_speeds",
        f"{STEPSEARCH}, section 4.2",
        "The key reward alone speeds early learning.",
        "stepsearch_ow_key",
        "ppo_f1",
        _all("more", curves.EARLY_AREA, curves.AREA),
        "before the first run",
    ),
    Claim(
        "key_reward_collapses",
        f"{STEPSEARCH}, section 4.2",
        "The key reward without step rewards risks collapse.",
        "stepsearch_ow_key",
        "ppo_f1",
        _all("more", curves.DROP, STOPPED),
        "before the first run",
    ),
    Claim(
        "filter",
        f"{DSPO}, section 4.2 and Table 1",
        "Without the dynamic filter DSPO answers worse.",
        "dspo",
        "gspo",
        _all("more", "subem", "em", "f1", curves.AT_BUDGET),
        "before the first run",
    ),
    Claim(
        "sequence_ratios",
        f"{DSPO}, section 4.2 and Table 1",
        f"Without sequence-level ratios, which leaves DAPO, DSPO answers worse ({_DAPO}).",
        "dspo",
        "dapo",
        _all("more", "subem", "em", "f1", curves.AT_BUDGET),
        "after the first run",
    ),
    Claim(
        "token_ratios_collapse",
        f"{DSPO}, section 4.3",
        f"Token-level runs (DAPO) collapse early in training, DSPO does not ({_DAPO}).",
        "dapo",
        "dspo",
        _all("more", curves.DROP, STOPPED),
        "after the first run",
    ),
    Claim(
        "high_rate",
        OURS,
        "At three times the learning rate sequence-level ratios are stabler than token-level ones (each with a clip "
        "range and a mean of its own).",
        "gspo_high_lr",
        "grpo_subem_high_lr",
        (*_all("less", curves.DROP, STOPPED), Measure("em", "more"), Measure(SPREAD, "less")),
        "before the first run",
    ),
    Claim(
        "reward_model_against_outcome",
        f"{PICA}, section 5.3 and Table 3",
        "Step rewards of a reward model answer better than the answer's reward alone.",
        "pica",
        "pica_w_f1",
        _all("more", "f1", "em", curves.AT_BUDGET),
        "after a run of one seed, whose results were not looked at",
    ),
    Claim(
        "step_penalty_shortens",
        f"{PICA}, section 5.3 and Figure 3",
        "The step penalty alone shortens trajectories (here: fewer searches).",
        "pica_w_f1_penalty",
        "pica_w_f1",
        _all("less", SEARCHES),
        ONE_KNOWN,
    ),
    Claim(
        "step_penalty_collapses",
        f"{PICA}, section 5.3 and Figure 3",
        "The step penalty alone then collapses; with the reward model training stays stable.",
        "pica_w_f1_penalty",
        "pica",
        _all("more", curves.DROP, STOPPED),
        ONE_KNOWN,
    ),
    Claim(
        "five_candidates",
        f"{SLATE}, section A.13 and Table 3",
        "Five candidates a step answer better than one.",
        "slate",
        "slate_k1",
        _all("more", "em", "f1", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "seven_candidates",
        f"{SLATE}, section A.13 and Table 3",
        f"Seven candidates give little more than five (no difference of {MARGIN}, a limit of ours).",
        "slate_k7",
        "slate",
        _all("no gain", "em", "f1"),
        ONE_KNOWN,
    ),
    Claim(
        "truncation_adds",
        f"{SLATE}, Table 2 (a)",
        "Truncated sampling answers better than complete trajectories with the same rewards.",
        "slate",
        "slate_wo_truncation",
        _all("more", "em", "f1", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "dense_rewards_add",
        f"{SLATE}, Table 2 (c)",
        "A judge's rewards of steps answer better than exact match alone, both with truncated sampling.",
        "slate",
        "slate_em_only",
        _all("more", "em", "f1", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "judge_against_rule",
        f"{SLATE}, Table 2 (b)",
        "A judge's rewards of steps answer better than rewards by rule (the rule is ours: the paper gives none).",
        "slate",
        "slate_wo_judge",
        _all("more", "em", "f1", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "early_bonus",
        f"{SLATE}, section A.11",
        "The bonus for an early answer saves searches.",
        "slate",
        "slate_wo_bonus",
        (Measure(SEARCHES, "less"), *_all("no gain", "em")),
        ONE_KNOWN,
    ),
    Claim(
        "evidence",
        f"{R_SEARCH}, Table 3",
        "Evidence and its rewards answer better than none.",
        "r_search",
        "r_search_wo_evidence",
        _all("more", "f1", "em", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "evidence_with_hops",
        f"{R_SEARCH}, Table 3",
        "Evidence helps more where a question has several hops.",
        "r_search",
        "r_search_wo_evidence",
        _all("more", HOPS_GAIN),
        ONE_KNOWN,
    ),
    Claim(
        "grpo_against_ppo",
        f"{R_SEARCH}, section 5.2 and Table 4",
        "R-Search answers better with GRPO than with PPO.",
        "r_search",
        "r_search_ppo",
        _all("more", "f1", "em", curves.AT_BUDGET),
        ONE_KNOWN,
    ),
    Claim(
        "evidence_as_tool",
        f"{R_SEARCH}, section 5.1 and Figure 2",
        "Another model answers better from the agent's evidence than from a plain search.",
        "r_search",
        PLAIN_SEARCH,
        _all("more", READ_EM),
        "after the first run",
    ),
)


@dataclass(frozen=True)
class Finding:
    """One measure of one claim; the difference is None where it cannot be measured, and may lack an interval (NaN)."""

    claim: Claim
    measure: Measure
    difference: Interval | None
    verdict: str


def judge(found: Interval | None, side: Side, num_seeds: int) -> str:
    """The verdict of one difference; see the module."""
    if found is None or math.isnan(found.mean):
        return NOT_MEASURED
    if found.ends is None or num_seeds < MIN_SEEDS:
        return UNDECIDED
    if side == "no gain":
        if found.low > -MARGIN and found.high < MARGIN:
            return REPRODUCED
        return NOT_REPRODUCED if found.low > 0 else HARMS if found.high < 0 else UNDECIDED
    low, high = (found.low, found.high) if side == "more" else (-found.high, -found.low)
    return REPRODUCED if low > 0 else NOT_REPRODUCED if high < 0 else UNDECIDED


def findings(
    results: Results,
    trainings: Sequence[TrainingRun],
    num_resamples: int,
    claims: Sequence[Claim] = CLAIMS,
    repeats: Repeats | None = None,
    tools: Mapping[str, Sequence[Gain]] = MappingProxyType({}),
) -> list[Finding]:
    """Every measure of every claim, in order.

    Args:
        results, trainings: what was measured.
        num_resamples: behind each interval over questions.
        claims: what is judged.
        repeats: how the start policies search, None if unknown.
        tools: system -> what another model gains from its evidence.
    """
    at = curves.window(trainings)
    found = []
    for claim in claims:
        is_testable = not _is_decided_by_start(results, claim, repeats)
        for measure in claim.measures:
            if measure.name == READ_EM:
                difference = _read_gain(tools.get(claim.policy, ()))
            else:
                difference = _difference(claim, measure.name, results, trainings, at, num_resamples)
            verdict = judge(difference, measure.side, len(results.seeds))
            if not is_testable and verdict != NOT_MEASURED:
                verdict = NOT_TESTABLE
            found.append(Finding(claim, measure, difference, verdict))
    return found


def _is_decided_by_start(results: Results, claim: Claim, repeats: Repeats | None) -> bool:
    """Whether one of the two policies is punished for what the start policy does in most of its right answers."""
    if repeats is None or not repeats.is_habit:
        return False
    return punishes(run for policy in (claim.policy, claim.against) for run in _runs(results, policy).values())


def _difference(
    claim: Claim, name: str, results: Results, trainings: Sequence[TrainingRun], at: Window | None, num_resamples: int
) -> Interval | None:
    if not claim.systems <= set(results.policies):
        return None
    if name in PLAYED:
        return _played(_runs(results, claim.policy), _runs(results, claim.against), name, num_resamples)
    if name == HOPS_GAIN:
        return _hops_gain(_runs(results, claim.policy), _runs(results, claim.against))
    if name == SPREAD:
        value = _spread(_runs(results, claim.policy)) - _spread(_runs(results, claim.against))
        return Interval(value, math.nan, math.nan, len(results.seeds))
    by_seed = [
        {training.seed: _number(training, name, at) for training in trainings if training.policy == policy}
        for policy in (claim.policy, claim.against)
    ]
    pairs = [(by_seed[0].get(seed), by_seed[1].get(seed)) for seed in results.seeds]
    values = [one - other for one, other in pairs if one is not None and other is not None]
    return over_seeds(values, (-1.0, 1.0)) if len(values) == len(pairs) else None


def _read_gain(found: Sequence[Gain]) -> Interval | None:
    """Exact match of another model from the agent's evidence, minus that from the best plain search."""
    return next((one.em_gain for one in found if (one.source, one.hops) == (EVIDENCE, gains.ALL)), None)


def _runs(results: Results, policy: str) -> dict[int, Run]:
    return {run.seed: run for run in results.runs if run.policy == policy}


def _played(ours: Mapping[int, Run], theirs: Mapping[int, Run], name: str, num_resamples: int) -> Interval:
    """The difference of two policies, paired on seed and question."""
    columns = [differences(_scores(ours[seed], name), _scores(theirs[seed], name)) for seed in sorted(ours)]
    table = [[column[question] for column in columns] for question in sorted(columns[0])]
    scores = [value for run in (*ours.values(), *theirs.values()) for value in _scores(run, name).values()]
    limit = max([1.0, *(value for value in scores if value is not None)])  # Searches are counts, the others shares.
    found = bootstrap_means(table, num_resamples, over=[range(len(columns))], bounds=[(-limit, limit)])[0]
    if not any(_answers(run, name) for run in (*ours.values(), *theirs.values())):
        return replace(
            found, low=math.nan, high=math.nan, over=""
        )  # No policy answers anything, so nothing is decided.
    return found


def _hops_gain(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> Interval | None:
    """By how much the gain in F1 is larger with several hops than with one; a number for each seed."""
    values = []
    for seed in sorted(ours):
        hops = {row.question_id: row.hops for row in ours[seed].scores["greedy"]}
        gains = differences(_scores(ours[seed], "f1"), _scores(theirs[seed], "f1"))
        by_kind = [
            [g for q, g in gains.items() if not math.isnan(g) and (hops[q] > 1) == many] for many in (True, False)
        ]
        if not all(by_kind):
            return None
        values.append(statistics.fmean(by_kind[0]) - statistics.fmean(by_kind[1]))
    return over_seeds(values, (-2.0, 2.0))


def _scores(run: Run, name: str) -> dict[str, float | None]:
    return {row.question_id: METRICS[name](row) for row in run.scores["greedy"]}


def _answers(run: Run, name: str) -> bool:
    return any(_scores(run, name).values())


def _spread(runs: Mapping[int, Run]) -> float:
    """Standard deviation of exact match over seeds, NaN for one seed."""
    means = [statistics.fmean(row.em for row in run.scores["greedy"]) for run in runs.values()]
    return statistics.stdev(means) if len(means) > 1 else math.nan


def _number(training: TrainingRun, name: str, at: Window | None) -> float | None:
    if name == STOPPED:
        return float(training.stopped is not None) if training.says_stopped else None
    return curves.reading(training, name, at)


def cells(results: Results, found: Iterable[Finding]) -> Iterable[Cell]:
    """Rows of `results.csv`: column `policy` says `<policy> - <against>`; each difference once."""
    seen = set()
    for one in found:
        pair, name, i = (one.claim.policy, one.claim.against), one.measure.name, one.difference
        if i is None or math.isnan(i.mean) or (pair, name) in seen:
            continue
        seen.add((pair, name))
        count = i.num_questions if name in (*PLAYED, READ_EM) else None
        runs = [run for policy in pair for run in _runs(results, policy).values()]
        mode = "greedy" if name in OF_CHECKPOINTS else "training"
        behind = origin(runs, is_training=mode == "training")
        yield Cell(" - ".join(pair), ALL, ALL, ALL, mode, name, *of_interval(i), count, *behind, i.over)


def _verdict(results: Results, trainings: Sequence[TrainingRun], one: Finding) -> str:
    """The verdict, and which of the two policies end as their start policy where what they answer is compared.

    They do so where no later policy was better in validation. Curves of training show the later policies, too.
    """
    if one.measure.name not in OF_CHECKPOINTS or one.verdict == NOT_MEASURED:
        return one.verdict
    told = [one.verdict]
    for policy in (one.claim.policy, one.claim.against):
        steps = [training.selected_step for training in trainings if training.policy == policy]
        if steps.count(0):
            told.append(f"{results.title(policy)} is its start policy in {steps.count(0)} of {len(steps)} seeds")
    return "; ".join(told)


def section(
    results: Results, trainings: Sequence[TrainingRun], found: Sequence[Finding], repeats: Repeats | None = None
) -> Section | None:
    """All measures of all claims, one line for a claim without its policies; None if no claim has its policies."""
    if not any(one.claim.systems <= set(results.policies) for one in found):
        return None
    rows = []
    for one in found:
        claim, is_first = one.claim, one.measure == one.claim.measures[0]
        about = [claim.text, claim.paper] if is_first else ["", ""]
        pair = f"{results.title(claim.policy)} - {results.title(claim.against)}"
        if claim.systems <= set(results.policies):
            is_known = one.difference is not None and not math.isnan(one.difference.mean)
            value = one.difference.text(signed=True) if one.difference and is_known else ""
            verdict = _verdict(results, trainings, one)
            written = claim.written if is_first else ""
            shown = verdict if is_first else f"({verdict})"
            rows.append([*about, f"{pair}: {NAMES[one.measure.name]}", value, shown, written])
        elif is_first:
            rows.append([*about, pair, "", NOT_MEASURED, claim.written])
    lead = " ".join((*own_split(results.manifest), _RULES, seeds_note(results.seeds), _LIMITS, *_start_note(repeats)))
    header = ["claim", "paper", "measured", "difference", "verdict", "claim written"]
    return Section("claims", "Claims of the papers", lead, header, rows)


_RULES = (
    "The first measure of a claim gives its verdict; verdicts of the others stand in parentheses. The last column says "
    "whether a claim with its measures was written before its policies were first run: a later one could be chosen by "
    "what it would say. Reproduced: the whole 95% interval of the difference is on the claimed side of 0; not "
    "reproduced: the whole interval is on the other side. A claim of no gain is reproduced if the whole interval lies "
    f"within {MARGIN} of 0, not reproduced if it lies above 0 and reaches further, and the policy "
    "harms if it lies below 0 and reaches further. One seed or two decide nothing, and no verdict is corrected for the "
    "number of claims. All differences are paired on seed, those of EM, F1 and subEM on question, too; these take the "
    "wider of two intervals, over questions and seeds and, where seeds differ, over seeds alone. Where neither policy "
    "answers a question nothing is decided. Where a verdict says that a policy is its start policy, training found "
    "none better in validation, and the difference is one from what was there before it."
)
_LIMITS = (
    "A standard deviation of so few seeds has no interval and is only shown. A model that brings its own prompt and "
    "grammar plays every method with them: reward and learning differ alone. All this is at the scale of this run, not "
    "at the papers'."
)


def _start_note(repeats: Repeats | None) -> list[str]:
    """How often the start policies repeat a query, and what follows for the claims about the penalty."""
    if repeats is None or not repeats.right:
        return []
    counted = f"In the start policies' recorded trajectories, {repeats}."
    if not repeats.is_habit:
        return [counted]
    return [
        f"{counted} A repeat returns documents seen before and costs as much as a right answer earns, so the "
        "redundancy penalty takes their worth from most right answers of the start policy, whatever it could teach: "
        "claims about it are not testable with this start policy."
    ]
