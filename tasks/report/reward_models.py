"""Figures of the reward models that this run has trained: on held-out plays, on other policies, and rows to audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.records import schema
from tasks.records.played import SAMPLES, LabelRow
from tasks.report.table import Results, Section
from tasks.reward_model.quality import QUALITY, Bin, Quality
from tasks.store import Row, read_json

MODELS, AFTER = Path("models"), Path("quality")
_HEADER = ("plays", "searches", "pivots", "AUC of pivots", "AUC of the answer", "ECE at the end", "ECE everywhere")
_MAX_SHOWN = 300


@dataclass(frozen=True)
class Measured:
    """One reward model of one seed.

    Attributes:
        name, seed: which.
        quality: on held-out plays of its own player.
        facts: of its training.
        after: system -> figures on that system's evaluation plays.
        samples: labelled plays for an audit.
    """

    name: str
    seed: int
    quality: Quality
    facts: Mapping[str, Any]
    after: Mapping[str, Quality]
    samples: Sequence[LabelRow]


def read(artifacts: Path, names: Sequence[str], seeds: Sequence[int]) -> list[Measured]:
    """The reward models of a run.

    Raises:
        DataError: a file is missing or malformed.
    """
    return [_one(artifacts, name, seed) for name in names for seed in seeds]


def _one(artifacts: Path, name: str, seed: int) -> Measured:
    folder, later = artifacts / MODELS / f"{name}-{seed}", artifacts / AFTER / f"{name}-{seed}" / QUALITY
    tree: Row = read_json(folder / QUALITY)
    facts = tree.pop("facts", {})
    after = {system: schema.parse(Quality, one, f"{later}: {system}") for system, one in read_json(later).items()}
    samples = [row for _, row in schema.read(LabelRow, folder / SAMPLES)]
    return Measured(name, seed, schema.parse(Quality, tree, str(folder / QUALITY)), facts, after, samples)


def sections(results: Results, measured: Sequence[Measured], users: Mapping[str, Sequence[str]]) -> Iterator[Section]:
    """The tables of the report; none where no reward model was trained.

    Args:
        results: names and titles of the systems.
        measured: see `read`.
        users: reward model -> systems that learn from it.
    """
    if measured:
        yield _held_out(measured, users)
        yield _by_turn(measured)
        yield _after(results, measured)
        yield _audit(measured)


def _held_out(measured: Sequence[Measured], users: Mapping[str, Sequence[str]]) -> Section:
    rows = []
    for one in measured:
        dropped = sum(one.facts["labels"]["dropped"].values())
        more = [_shown(one.facts["control_auc"]), _shown(one.facts["blanked_auc"]), str(dropped)]
        rows.append([one.name, str(one.seed), *_figures(one.quality), *more])

    lead = (
        "Plays of questions that were kept out of the training of the reward model. AUC of pivots: chance that a pivot "
        "earns more than another search. ECE: expected calibration error of f, over ten bins. Shuffled labels: the AUC "
        "of pivots of a second model that learned from them, 0.5 if the measuring makes no figure out of nothing. "
        "Without words: that of a third one, which learned the right labels from texts whose words are all the same, "
        "so from places, lengths and tags alone; only what the model has above it was read. Dropped: plays without "
        "usable labels. The chart shows the rate of right answers against f(T), the mean over seeds and its range; a "
        "calibrated model lies on the diagonal."
    )

    header = ["reward model", "seed", *_HEADER, "AUC, shuffled labels", "AUC, without words", "plays dropped"]
    series = [
        {"policy": policy, "points": points}
        for name in dict.fromkeys(one.name for one in measured)
        if (points := _reliability([one for one in measured if one.name == name]))
        for policy in users.get(name, [name])[:1]
    ]
    axes = ("f at the end", "right answers")
    return Section("reward-models", "Reward models", lead, header, rows, series, axes, has_diagonal=True)


def _reliability(measured: Sequence[Measured]) -> list[list[float]]:
    """[mean f, mean rate, lowest, highest rate] of each bin, over seeds."""
    by_bin: dict[float, list[Bin]] = {}
    for one in measured:
        for each in one.quality.reliability:
            by_bin.setdefault(each.low, []).append(each)
    points = []
    for _, bins in sorted(by_bin.items()):
        rates = [each.rate for each in bins]
        mean = sum(each.mean for each in bins) / len(bins)
        points.append([mean, sum(rates) / len(rates), min(rates), max(rates)])
    return points


def _by_turn(measured: Sequence[Measured]) -> Section:
    rows = []
    for one in measured:
        start = [(f"f(0), {by.hops} hops", by.count, by.mean, by.rate, None) for by in one.quality.start]
        turns = [(f"f({at.turn})", at.count, at.mean, at.rate, at.auc) for at in one.quality.turns]
        for name, count, mean, rate, auc in [*start, *turns]:
            rows.append([one.name, str(one.seed), name, str(count), _shown(mean), _shown(rate), _shown(auc)])
    lead = (
        "The probability that a reward model gives after each search, beside the rate of right answers of these plays. "
        "PiCA's loss over pivots asks for gains at each of them, and so pushes the first values down."
    )
    header = ["reward model", "seed", "place", "plays", "mean", "right", "AUC of the answer"]
    return Section("reward-models-turns", "Reward models, turn by turn", lead, header, rows)


def _after(results: Results, measured: Sequence[Measured]) -> Section:
    rows = [
        [one.name, str(one.seed), results.title(system), *_figures(quality)]
        for one in measured
        for system, quality in one.after.items()
    ]
    lead = (
        "The same figures on evaluation plays of this run's systems: questions of another split, and policies that the "
        "reward model has not seen, some of them trained against it."
    )
    header = ["reward model", "seed", "system", *_HEADER]
    return Section("reward-models-later", "Reward models on other policies", lead, header, rows)


def _audit(measured: Sequence[Measured]) -> Section:
    rows = []
    for one in measured:
        for sample in one.samples:
            searches = [turn for turn in sample.turns if turn.executed]
            answer = f"{sample.answer or 'no answer'} ({'right' if sample.is_right else 'wrong'})"
            golden = " · ".join(sample.golden)
            for number, (turn, label) in enumerate(zip(searches, sample.labels, strict=True)):
                found = " ".join(turn.observation.split())[:_MAX_SHOWN]
                # What is the same for all searches of a play stands once, so that plays are seen apart.
                play = ["", "", "", ""] if number else [one.name, sample.question, golden, answer]
                rows.append([*play, turn.content, found, label, sample.reason[:_MAX_SHOWN]])
    lead = (
        "Labelled plays, drawn by seed, for a human audit: is a search with + one that found the next fact of the "
        "question's chain (golden hops, in order), and every other one with -? A rule gives no reason."
    )
    header = ["reward model", "question", "golden hops", "answer", "query", "what was found", "label", "reason"]
    return Section("audit", "Labels to audit", lead, header, rows, is_on_page_only=True)


def _figures(quality: Quality) -> list[str]:
    counts = (quality.num_trajectories, quality.num_searches, quality.num_pivots)
    values = (quality.pivot_auc, quality.outcome_auc, quality.ece, quality.ece_all)
    return [*map(str, counts), *map(_shown, values)]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
