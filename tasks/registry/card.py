"""What is registered: the best trained policy of a report with its card, and whether it beats the champion."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf, identity, planned, store
from tasks.evaluate import statistics
from tasks.evaluate.statistics import Interval
from tasks.model_files import require_weights
from tasks.records import schema, systems
from tasks.records.scores import ScoreRow
from tasks.runner.git import read_commit
from tasks.store import DataError

RESULTS = Path("reports/results.csv")
TRAINED, EVALUATED = Path("artifacts/train"), Path("artifacts/evaluate")
METRICS = ("em", "f1", "subem", "searches")
NUM_RESAMPLES = 2000
WHOLE = {"seed": "all", "dataset": "all", "hops": "all", "mode": "greedy", "metric": "em"}


Measured = tuple[float, float | None, float | None]
"""Mean over questions, and the ends of its interval."""


@dataclass(frozen=True)
class Card:
    """What a version says of its policy; `card.json` of the model.

    Attributes:
        system, seed: which policy.
        settings: those of its evaluation: prompt, grammar, budgets, generator, retriever.
        data_sha256, policy_sha256, config_sha256: hashes of data, weights and settings of the training.
        git_commit, git_dirty: where it was registered.
        libraries: versions.
        results: metric -> mean over questions, and the ends of its 95% interval; None where that would exclude nothing.
        scores: question -> exact match, greedily played.
    """

    system: str
    seed: int
    settings: dict[str, Any]
    data_sha256: str
    policy_sha256: str
    config_sha256: str
    git_commit: str
    git_dirty: bool
    libraries: dict[str, str]
    results: dict[str, Measured]
    scores: dict[str, float]

    @property
    def name(self) -> str:
        """Such as `slate-0`."""
        return f"{self.system}-{self.seed}"


def best(root: Path) -> Card:
    """The card of the best trained policy in the report; see `tasks.registry`.

    Raises:
        DataError: there is no report, or it has no trained system.
    """
    path = root / RESULTS
    if not path.is_file():
        raise DataError(f"{RESULTS}: the file is missing. Run `make run`, which makes it.")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if WHOLE.items() <= row.items()]
    ems = {row["policy"]: float(row["value"]) for row in rows if _folders(root, row["policy"])}
    if not ems:
        raise DataError(f"{RESULTS}: found no trained system. Add a method, such as METHODS=search_r1_grpo.")
    policies = _folders(root, max(ems, key=lambda name: ems[name]))
    card = max((_card(root, folder) for folder in policies), key=lambda card: card.results["em"][0])
    if (card.results["em"][1] or 0.0) <= 0:
        raise DataError(
            f"{RESULTS}: the best policy, {card.name}, has exact match {as_text(*card.results['em'])}: "
            "it may be 0, so it has learned nothing. Train at a larger scale than smoke."
        )
    return card


def _folders(root: Path, system: str) -> list[Path]:
    """The folders of a system's trained policies, in the order of their seeds."""
    found = [path for path in (root / TRAINED).glob(f"{system}-*") if path.name.rpartition("-")[0] == system]
    trained = [path for path in found if systems.read(path).is_trained and (path / "policy").is_dir()]
    return sorted(trained, key=lambda path: systems.read(path).seed)


def _card(root: Path, folder: Path) -> Card:
    record, summary, code = systems.read(folder), store.read_json(folder / "summary.json"), read_commit(root)
    require_weights(folder / "policy", record.policy_sha256)
    rows = [row for _, row in schema.read(ScoreRow, root / EVALUATED / folder.name / "scores.jsonl")]
    greedy = [row for row in rows if row.mode == "greedy"]
    return Card(
        system=record.name,
        seed=record.seed,
        settings=planned.read(root, f"evaluate@{folder.name}").settings,
        data_sha256=summary["data_sha256"],
        policy_sha256=record.policy_sha256,
        config_sha256=summary["config_sha256"],
        git_commit=code.sha or "none",
        git_dirty=code.is_dirty,
        libraries=identity.recorded(),
        results=intervals(greedy),
        scores={row.question_id: float(row.em) for row in greedy},
    )


def as_text(mean: float, low: float | None, high: float | None) -> str:
    """A figure of a card, such as `0.687 [0.648, 0.722]`."""
    return statistics.shown(mean, None if low is None or high is None else (low, high))


def intervals(rows: list[ScoreRow]) -> dict[str, Measured]:
    """Metric -> mean over questions and the ends of its 95% interval."""
    table = [[getattr(row, metric) for metric in METRICS] for row in rows]
    bounds = [(0.0, 1.0) if metric != "searches" else None for metric in METRICS]
    found = statistics.bootstrap_means(table, NUM_RESAMPLES, bounds=bounds)
    return {metric: (one.mean, *(one.ends or (None, None))) for metric, one in zip(METRICS, found, strict=True)}


def read(path: Path) -> Card:
    """The card of a model.

    Raises:
        ValueError: it is none.
    """
    return conf.fill(Card, store.read_json(path), str(path))


def lead(card: Card, champion: Card) -> Interval:
    """How much higher the exact match of a policy is than the champion's, with the paired 95% interval.

    Raises:
        ValueError: they were not measured alike; names the difference.
    """
    for what, ours, theirs in (
        ("data", card.data_sha256, champion.data_sha256),
        ("passages per search", _top_k(card), _top_k(champion)),
        ("questions", sorted(card.scores), sorted(champion.scores)),
    ):
        if ours != theirs:
            raise ValueError(f"{card.name} and the champion {champion.name} were measured with different {what}")
    paired = statistics.differences(card.scores, champion.scores)
    (found,) = statistics.bootstrap_means([[value] for value in paired.values()], NUM_RESAMPLES, bounds=[(-1.0, 1.0)])
    return found


def _top_k(card: Card) -> int:
    settings: Mapping[str, Any] = card.settings
    return int(settings["top_k"] or settings["playing"]["rollout"]["top_k"])
