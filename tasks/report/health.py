"""Health of training: metrics of the last third of each run, how runs ended, and groups without a signal.

It shows every metric that a run logged and judges none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.evaluate.statistics import over_seeds
from tasks.report.curves import seeds_note
from tasks.report.table import Results, Section
from tasks.report.training import TrainingRun

METRICS = (
    "entropy",
    "approx_kl",
    "clip_fraction",
    "reward_std",
    "share_with_signal",
    "share_all_zero",
    "share_all_one",
    "valid_action_rate",
    "response_tokens",
    "answer_words",
    "repeated_query_rate",
    "logprob_gap_max",
    "filter_kept_share",
    "sampling_rounds",
    "learned_share",
    "skipped_update",
    "missing_scores_mean",
    "judge_unreadable_mean",
)
"""The columns, each only where a run has it."""


def section(results: Results, trainings: Sequence[TrainingRun]) -> Section | None:
    """One line a trained policy, None where nothing was trained or logged."""
    names = [name for name in METRICS if any(_value(training, name) is not None for training in trainings)]
    rows = []
    for policy in results.policies:
        own = [training for training in trainings if training.policy == policy]
        if own:
            values = [_mean([_value(training, name) for training in own]) for name in names]
            rows.append([results.title(policy), *map(_text, values), _stopped(own), _selected(own)])
    if not rows:
        return None
    lead = (
        "The last third of training, mean over seeds; of the logprob gap the largest of each seed. Share with signal: "
        "groups whose rewards differ, before any filter, only where there are groups. The selected step is the "
        "checkpoint that was evaluated, seed by seed: the best by validation, or the last where `select` says so. "
        "Missing scores: searches of a trajectory without a number of the reward model; judge unreadable: scores of 0 "
        "that stand for a judge's reply without a score. What a run did not log is left empty."
    )
    header = ["policy", *(name.replace("_", " ") for name in names), "stopped", "selected step"]
    return Section("health-table", "Health in numbers", lead, header, rows)


def _value(training: TrainingRun, name: str) -> float | None:
    if name == "share_with_signal" and not training.has_groups:
        return None
    if name.endswith("_max"):
        return max(training.values(name, 2), default=None)
    return training.mean(name, 2)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _stopped(own: Sequence[TrainingRun]) -> str:
    if not any(training.says_stopped for training in own):
        return ""
    ends = [f"seed {t.seed} at step {t.stopped['step']}: {t.stopped['reason']}" for t in own if t.stopped is not None]
    return f"{len(ends)} of {len(own)}" + (f" ({'; '.join(ends)})" if ends else "")


def _selected(own: Sequence[TrainingRun]) -> str:
    if all(training.selected_step is None for training in own):
        return ""
    return ", ".join("?" if training.selected_step is None else str(training.selected_step) for training in own)


def no_signal(training: TrainingRun, third: int) -> float | None:
    """Share of groups whose rewards are all equal in the first (0) or last (2) third; None without groups."""
    share = training.mean("share_with_signal", third) if training.has_groups else None
    return None if share is None else 1 - share


def signal_section(results: Results, trainings: Sequence[TrainingRun]) -> Section | None:
    """Groups without a signal in the first and the last third of training, and the change."""
    rows = []
    for policy in results.policies:
        own = [training for training in trainings if training.policy == policy]
        pairs = [(no_signal(training, 0), no_signal(training, 2)) for training in own]
        known = [(first, last) for first, last in pairs if first is not None and last is not None]
        if known and len(known) == len(own):
            shares = [over_seeds([pair[i] for pair in known], (0.0, 1.0)) for i in (0, 1)]
            change = over_seeds([last - first for first, last in known], (-1.0, 1.0))
            rows.append([results.title(policy), *(share.text() for share in shares), change.text(signed=True)])
    if not rows:
        return None
    lead = (
        "DSPO argues that groups in which all trajectories succeed, or all fail, teach nothing, and filters them out. "
        "This is their share before any filter. No verdict is given: a start policy that always answers some questions "
        "and never others has such groups by construction, and the paper names no share that would be many. "
        f"{seeds_note(results.seeds)}"
    )
    return Section("signal", "Groups without a signal", lead, ["policy", "first third", "last third", "change"], rows)


def evidence_section(results: Results, trainings: Sequence[TrainingRun]) -> Section | None:
    """How faithful and how useful evidence is, as the start policy writes it and at the end of training."""
    rows = []
    for policy in results.policies:
        own = [training for training in trainings if training.policy == policy]
        columns = []
        for name in ("evidence_verbatim_mean", "evidence_f1_mean"):
            columns += [[training.first(name) for training in own], [training.mean(name, 2) for training in own]]

        known = [[value for value in column if value is not None] for column in columns]
        if own and known == columns:
            rows.append([results.title(policy), *(over_seeds(one, (0.0, 1.0)).text() for one in known)])
    if not rows:
        return None
    lead = (
        "Word for word: the share of trajectories whose evidence stands in one retrieved passage as it is. The "
        "reader's F1 is that of its answers to the evidence; a trajectory without evidence has 0 in both. The first "
        "step plays the start policy, so its columns say how well that copies: a policy that copies badly can learn "
        "little from a reward for evidence. "
        f"{seeds_note(results.seeds)}"
    )
    header = ["policy"]
    for name in ("word for word", "reader's F1"):
        header += [f"{name}, first step", f"{name}, last third"]
    return Section("evidence", "Evidence", lead, header, rows)
