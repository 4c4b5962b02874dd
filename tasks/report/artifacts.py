"""Reads the artifacts of finished stages for the report, and refuses artifacts of runs that cannot be compared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.records import schema
from tasks.records import systems as records
from tasks.records.scores import ScoreRow
from tasks.store import DataError, Row, read_json

_AT = re.compile(r"[a-z_]+@\d+")

HASHES = ("data_sha256", "policy_sha256", "config_sha256")
TRAINING = ("steps", "num_trajectories", "generated_tokens", "prefill_tokens", "searches")


@dataclass(frozen=True)
class Run:
    """One evaluated system.

    Attributes:
        policy, seed: of the system.
        summary: the summary of its evaluation.
        scores: mode -> rows.
        training: the summary of its training, None where it was not trained.
        made_by: the stage that made what was played.
    """

    policy: str
    seed: int
    summary: Row
    scores: Mapping[str, Sequence[ScoreRow]]
    training: Row | None
    made_by: str

    @property
    def stage(self) -> str:
        """The name of the stage that played the questions."""
        return f"evaluate@{self.policy}-{self.seed}"


def read_run(artifacts: Path, policy: str, seed: int) -> Run:
    """The evaluation of one system and seed, with its training summary if it was trained.

    Raises:
        DataError: a file is missing or malformed, or the evaluated policy is not the one that its stage made.
    """
    folder, made = artifacts / "evaluate" / f"{policy}-{seed}", artifacts / "train" / f"{policy}-{seed}"
    summary = _read_summary(folder / "summary.json", HASHES, {"policy": policy, "seed": seed})
    system = records.read(made)
    training = None
    if system.is_trained:
        training = _read_summary(made / "summary.json", (*HASHES, *TRAINING), {"method": policy, "seed": seed})
    _same_policy(folder / "summary.json", summary, made / records.FILE, system.policy_sha256)
    if training is not None:
        _same_policy(folder / "summary.json", summary, made / "summary.json", training["policy_sha256"])
    return Run(policy, seed, summary, read_scores(folder / "scores.jsonl"), training, system.made_by)


def _same_policy(path: Path, summary: Row, made: Path, policy_sha256: str) -> None:
    if summary["policy_sha256"] != policy_sha256:
        raise DataError(
            f"{path}: policy_sha256={summary['policy_sha256']!r}, but {made} has {policy_sha256!r}: another policy was "
            "evaluated. Run `dvc repro` to bring the evaluation up to date."
        )


def _read_summary(path: Path, needed: Iterable[str], expected: Mapping[str, object]) -> Row:
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise DataError(f"{path}: found {type(summary).__name__}, expected a JSON object.")
    for key in (*expected, *needed):
        if key not in summary:
            raise DataError(f"{path}: key {key!r} is missing. Run the stage that writes this file again.")
    for key, value in expected.items():
        if summary[key] != value:
            raise DataError(f"{path}: {key}={summary[key]!r}, expected {value!r}: the file is from another run.")
    return summary


def read_scores(path: Path) -> dict[str, list[ScoreRow]]:
    """Rows of `scores.jsonl` by mode; one row per question and mode.

    Raises:
        DataError: a bad row, a question twice, modes with different questions, or no row at all.
    """
    scores: dict[str, list[ScoreRow]] = {}
    seen: set[tuple[str, str]] = set()
    for number, row in schema.read(ScoreRow, path):
        key = (row.mode, row.question_id)
        if key in seen:
            raise DataError(f"{path}: row {number}: question {key[1]!r} appears twice in mode {key[0]!r}.")
        seen.add(key)
        scores.setdefault(row.mode, []).append(row)
    if "greedy" not in scores:
        raise DataError(f"{path}: found no row of mode 'greedy', expected one a question. Run the stage again.")
    for mode, rows in scores.items():
        if {row.question_id for row in rows} != {row.question_id for row in scores["greedy"]}:
            raise DataError(f"{path}: mode {mode!r} has other questions than 'greedy'. Run the stage again.")
    return scores


def same_data(runs: Sequence[Run], manifest: Any, artifacts: Path) -> str:
    """The hash of the data that all runs played.

    Raises:
        DataError: two runs played different data or questions, or the data has changed since.
    """
    first = runs[0]
    sha: str = first.summary["data_sha256"]
    ids = {row.question_id for row in first.scores["greedy"]}

    for run in runs:
        where = artifacts / "evaluate" / f"{run.policy}-{run.seed}"
        if run.summary["data_sha256"] != sha:
            raise DataError(
                f"{where / 'summary.json'}: data_sha256={run.summary['data_sha256']!r}, but {first.stage} has {sha!r}: "
                "the two were evaluated on different data. Run `dvc repro` to bring all of them up to date."
            )
        if {row.question_id for row in run.scores["greedy"]} != ids:
            raise DataError(
                f"{where / 'scores.jsonl'}: found other questions than in {first.stage}. Run `dvc repro` again."
            )

    known = manifest.get("data_sha256") if isinstance(manifest, dict) else None
    if known not in (None, sha):
        raise DataError(
            f"{artifacts / 'data' / 'manifest.json'}: data_sha256={known!r}, but {first.stage} played {sha!r}. "
            "Run `dvc repro` to bring the evaluation up to date."
        )
    return sha


@dataclass(frozen=True)
class Recall:
    """`recall.json`.

    Attributes:
        datasets: dataset -> {"num_questions": n, "recall@3": x, ...}.
        config_sha256: of the stage's settings.
    """

    datasets: dict[str, dict[str, float]]
    config_sha256: str


def read_recall(path: Path) -> Recall:
    """`recall.json`: {"datasets": {name: {"num_questions": n, "<metric>@<k>": share, ...}}, "config_sha256": hash}.

    Raises:
        DataError: another shape, or a share outside [0, 1].
    """
    tree = read_json(path)
    datasets = tree.get("datasets") if isinstance(tree, dict) else None
    if not isinstance(datasets, dict) or not all(isinstance(row, dict) for row in datasets.values()):
        raise DataError(f"{path}: expected {{'datasets': {{name: object}}}}. Run the stage `recall` again.")
    rows = {name: _recall_row(row, f"{path}: {name}") for name, row in sorted(datasets.items())}
    return Recall(rows, _config(tree, path, "recall"))


def _config(tree: Row, path: Path, stage: str) -> str:
    if not isinstance(tree.get("config_sha256"), str):
        raise DataError(f"{path}: key 'config_sha256' is missing. Run the stage `{stage}` again.")
    return str(tree["config_sha256"])


def _recall_row(row: Row, where: str) -> dict[str, float]:
    found = {key: value for key, value in row.items() if _AT.fullmatch(key)}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise DataError(f"{where}: {key}={value!r}, expected a number in [0, 1].")
    count = row.get("num_questions")
    if not isinstance(count, int):
        raise DataError(f"{where}: num_questions={count!r}, expected an integer.")
    return {"num_questions": count, **{key: float(found[key]) for key in sorted(found, key=depth_order)}}


Compared = dict[str, dict[str, Row]]
"""Name of a retriever, or "b - a" -> dataset -> {"num_questions", "<metric>@<k>": {value, low, high}}.

Both ends are null where the interval would exclude nothing.
"""


@dataclass(frozen=True)
class Retrievers:
    """`retrievers.json`.

    Attributes:
        retrievers: the figures of each retriever.
        differences: the differences of each two retrievers.
        config_sha256: of the stage's settings.
    """

    retrievers: Compared
    differences: Compared
    config_sha256: str


def read_retrievers(path: Path) -> Retrievers:
    """The retrievers of `retrievers.json`, and the differences of each two.

    Raises:
        DataError: another shape, or a share or interval that cannot be one.
    """
    tree = read_json(path)
    parts: list[Any] = [tree.get(key) if isinstance(tree, dict) else None for key in ("retrievers", "differences")]
    if not all(isinstance(part, dict) and all(isinstance(one, dict) for one in part.values()) for part in parts):
        raise DataError(
            f"{path}: expected {{'retrievers': {{name: object}}, 'differences': {{name: object}}}}. "
            "Run the stage `retrievers` again."
        )
    retrievers, differences = parts
    return Retrievers(
        {name: _compared_rows(one["datasets"], 0, f"{path}: {name}") for name, one in retrievers.items()},
        {name: _compared_rows(one, -1, f"{path}: {name}") for name, one in differences.items()},
        _config(tree, path, "retrievers"),
    )


def _compared_rows(rows: Mapping[str, Row], least: int, where: str) -> dict[str, Row]:
    return {dataset: _compared_row(row, least, f"{where}: {dataset}") for dataset, row in rows.items()}


def _compared_row(row: Row, least: int, where: str) -> Row:
    count = row.get("num_questions")
    if not isinstance(count, int):
        raise DataError(f"{where}: num_questions={count!r}, expected an integer.")
    names = sorted((key for key in row if _AT.fullmatch(key)), key=depth_order)
    for name in names:
        figure: Row = row[name] if isinstance(row[name], dict) else {}
        low, value, high = (figure.get(key, math.nan) for key in ("low", "value", "high"))
        if low is None and high is None:  # An interval that would exclude nothing.
            low = high = value
        if (
            not all(isinstance(one, float | int) for one in (low, value, high))
            or not least <= low <= value <= high <= 1
        ):
            raise DataError(f"{where}: {name}={row[name]!r}, expected low <= value <= high in [{least}, 1].")
    return {"num_questions": count, **{name: row[name] for name in names}}


def depth_order(name: str) -> tuple[bool, str, int]:
    """Recall first, then by name, then by depth."""
    metric, _, depth = name.partition("@")
    return metric != "recall", metric, int(depth)
