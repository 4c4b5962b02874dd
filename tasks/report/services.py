"""What services did in each stage of a run, for the cost tables: work from artifacts, time and hits from the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.records.played import SUMMARY
from tasks.records.usage import PROCESS, WORK
from tasks.report.table import Results
from tasks.store import Row, read_json

STAGES = {"train": "training", "evaluate": "evaluation", "trajectories": "its trajectories", "labels": "its labels"}


def rows(results: Results, reward_models: Sequence[str], artifacts: Path, ledger: Mapping[str, Row]) -> list[Row]:
    """A row for each stage and each service it asked, with means over seeds.

    Counts of `PROCESS` are None unless the ledger has every seed: a stage's result may come from a cache.
    """
    asked: dict[tuple[str, str], list[tuple[Row, str]]] = {}  # (who, stage) -> summary and item of each seed.
    for run in results.runs:
        asked.setdefault((run.policy, "evaluate"), []).append((run.summary, run.stage))
        if run.training is not None:
            asked.setdefault((run.policy, "train"), []).append((run.training, run.made_by))
    for name in reward_models:
        for stage in ("trajectories", "labels"):
            items = [f"{name}-{seed}" for seed in results.seeds]
            found = [(read_json(artifacts / stage / item / SUMMARY), f"{stage}@{item}") for item in items]
            asked[name, stage] = found

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
