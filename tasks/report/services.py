"""What services did in each stage of a run, for the cost tables: work from artifacts, time and hits from the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.records.played import SUMMARY
from tasks.records.usage import PROCESS, WORK
from tasks.report.table import Results
from tasks.store import Row, read_json

STAGES = {
    "augment": "augmentation",
    "train": "training",
    "evaluate": "evaluation",
    "trajectories": "its trajectories",
    "labels": "its labels",
    "reward_quality": "its figures on other policies",
    "tool": "its evidence as a tool",
}
_FOLDERS = {"reward_quality": "quality"}
"""Where a stage's folder has another name."""


def rows(results: Results, made: Mapping[str, Sequence[str]], artifacts: Path, ledger: Mapping[str, Row]) -> list[Row]:
    """A row for each stage and each service it asked, with means over seeds.

    Counts of `PROCESS` are None unless the ledger has every seed: a stage's result may come from a cache.

    Args:
        results: systems, seeds and the summary of the stage `augment`.
        made: further stages -> names of what each made, with every seed.
        artifacts: where the summaries are.
        ledger: what was measured on this machine.
    """
    # (who, stage) -> summary and item of each seed.
    asked: dict[tuple[str, str], list[tuple[Row, str]]] = {
        ("sub-questions", "augment"): [(results.augmentation, "augment")]
    }
    for run in results.runs:
        asked.setdefault((run.policy, "evaluate"), []).append((run.summary, run.stage))
        if run.training is not None:
            asked.setdefault((run.policy, "train"), []).append((run.training, run.made_by))
    for stage, names in made.items():
        for name in names:
            items, folder = [f"{name}-{seed}" for seed in results.seeds], artifacts / _FOLDERS.get(stage, stage)
            asked[name, stage] = [(read_json(folder / item / SUMMARY), f"{stage}@{item}") for item in items]

    return [
        {"who": who, "stage": STAGES[stage], **one}
        for (who, stage), runs in sorted(asked.items(), key=lambda item: list(STAGES).index(item[0][1]))
        for one in _roles([(summary["services"], item) for summary, item in runs if "services" in summary], ledger)
    ]


def _roles(runs: Sequence[tuple[Row, str]], ledger: Mapping[str, Row]) -> list[Row]:
    work = [services for services, _ in runs]
    measured = [ledger.get(item, {}).get("services", {}) for _, item in runs]
    roles = dict.fromkeys(role for services in work for role in services)
    return [{"role": role} | _means(work, role, WORK) | _means(measured, role, PROCESS) for role in roles]


def _means(by_run: Sequence[Mapping[str, Row]], role: str, names: Sequence[str]) -> Row:
    counts = [services.get(role, {}) for services in by_run]
    return {
        name: sum(count[name] for count in counts) / len(counts) if all(name in count for count in counts) else None
        for name in names
    }
