"""The result table: from the artifacts of finished stages to `results.csv`, `results.md` and a terminal table.

It plays no question and computes no score; it averages, attaches intervals, and refuses artifacts that do not
belong together. `results.csv` and `results.md` are functions of the artifacts alone: what was measured on one
machine (seconds, run ids, commits) lives in the ledger and appears only in the terminal table and the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from tasks.data.ingest import fault_lines
from tasks.evaluate.statistics import Values, bootstrap_means, differences
from tasks.records import schema
from tasks.records import systems as records
from tasks.records.scores import ScoreRow
from tasks.report.augmentation import augmentation_line, funnel, read_augmentation
from tasks.store import DataError, Row, read_json, replacing

ALL = "all"
SHARES = ("em", "f1", "subem", "recall", "valid_action_rate", "answered", "failed")  # Metrics between 0 and 1.
MINUS = "_minus_"
PAIRED = ("em", "f1", "subem", "recall")  # Metrics that are also reported as a difference to the reference.


def _valid_action_rate(row: ScoreRow) -> float | None:
    return row.valid_actions / row.actions if row.actions else None


METRICS: dict[str, Callable[[ScoreRow], float | None]] = {
    "em": lambda row: row.em,
    "f1": lambda row: row.f1,
    "subem": lambda row: row.subem,
    "recall": lambda row: row.recall,
    "searches": lambda row: row.searches,
    "valid_action_rate": _valid_action_rate,
    "answered": lambda row: float(row.status == "answered"),
    "failed": lambda row: float(row.status == "failed"),
    "generated_tokens": lambda row: row.generated_tokens,
    "prefill_tokens": lambda row: row.prefill_tokens,
}
"""Metric -> value of one row of `scores.jsonl`; None where it does not apply (no gold passage, no action)."""

_AT = re.compile(r"[a-z_]+@\d+")

TRAINING = ("steps", "num_trajectories", "generated_tokens", "prefill_tokens", "searches")


@dataclass(frozen=True)
class Run:
    """One evaluated system.

    Attributes:
        policy, seed: which.
        summary: of the evaluation.
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


@dataclass(frozen=True)
class Cell:
    """One row of `results.csv`, in the order of its columns; None is written as nothing."""

    policy: str
    seed: str
    dataset: str
    hops: str
    mode: str
    metric: str
    value: float
    low: float | None
    high: float | None
    num_questions: int | None
    data_sha256: str
    policy_sha256: str


@dataclass(frozen=True)
class Section:
    """A table made elsewhere (`tasks.report.study`) that the Markdown file and the page show alike.

    Attributes:
        id: its anchor.
        title: its heading.
        lead: what the reader must know before the numbers.
        header, rows: the table; every cell is text.
        series: lines of a chart on the page, one a policy: {"policy", "points": [[x, mean, low, high], ...]}.
        axes: names of the chart's axes.
    """

    id: str
    title: str
    lead: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    series: Sequence[Row] = ()
    axes: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Results:
    """Everything the table, the page and the terminal show.

    Attributes:
        policies: the systems in the order they are shown.
        seeds: in the order they are shown.
        reference: the system that differences are to.
        runs: one per policy and seed.
        cells: the rows of `results.csv`.
        recall: dataset -> {"num_questions", "recall@k": ...} of the retriever alone.
        retrievers: the retrievers that were compared, in order.
        differences: "b - a" of each two of them, paired by question.
        validation, manifest: the documents of the data stages, as they are.
        augmentation: the summary of the stage `augment`.
        titles: policy -> display name.
        sections: further tables.
    """

    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: tuple[Run, ...]
    cells: tuple[Cell, ...]
    recall: Mapping[str, Mapping[str, float]]
    retrievers: tuple[str, ...]
    differences: tuple[str, ...]
    validation: Any
    manifest: Any
    augmentation: Row
    titles: Mapping[str, str]
    sections: tuple[Section, ...] = ()

    def title(self, policy: str) -> str:
        """Display name of a policy; its plain name if it has none."""
        return self.titles.get(policy, policy)

    def find(
        self,
        policy: str,
        metric: str,
        seed: int | str = ALL,
        dataset: str = ALL,
        hops: int | str = ALL,
        mode: str = "greedy",
    ) -> Cell | None:
        """The one cell with these keys, None if there is none."""
        return self._index().get((policy, str(seed), dataset, str(hops), mode, metric))

    def _index(self) -> dict[tuple[str, ...], Cell]:
        found = self.__dict__.get("_cells_by_key")
        if found is None:
            found = {(c.policy, c.seed, c.dataset, c.hops, c.mode, c.metric): c for c in self.cells}
            object.__setattr__(self, "_cells_by_key", found)
        return found


def build(
    artifacts: Path,
    systems: Sequence[str],
    seeds: Sequence[int],
    reference: str,
    num_resamples: int,
    titles: Mapping[str, str] | None = None,
) -> Results:
    """Read the artifacts of exactly these systems and seeds, and make the table; differences are to the reference.

    Raises:
        DataError: a file is missing or malformed, or runs do not belong together (other data, other questions).
    """
    runs = tuple(read_run(artifacts, policy, seed) for policy in systems for seed in seeds)
    manifest = read_json(artifacts / "data" / "manifest.json")
    data_sha256 = _same_data(runs, manifest, artifacts)
    recall = read_recall(artifacts / "recall.json")
    compared, differences = read_retrievers(artifacts / "retrievers.json")
    cells = [
        *_score_cells(runs, systems, reference, num_resamples),
        *_training_cells(runs, systems),
        *_recall_cells(recall, data_sha256),
        *_compared_cells({**compared, **differences}, data_sha256),
    ]
    return Results(
        policies=tuple(systems),
        seeds=tuple(seeds),
        reference=reference,
        runs=runs,
        cells=tuple(cells),
        recall=recall,
        retrievers=tuple(compared),
        differences=tuple(differences),
        validation=read_json(artifacts / "validation.json"),
        manifest=manifest,
        augmentation=read_augmentation(artifacts / "augment" / "summary.json"),
        titles=titles or {},
    )


# Reading


def read_run(artifacts: Path, policy: str, seed: int) -> Run:
    """The evaluation of one system and seed, with its training summary if it was trained."""
    folder, made = artifacts / "evaluate" / f"{policy}-{seed}", artifacts / "train" / f"{policy}-{seed}"
    summary = _read_summary(folder / "summary.json", ("data_sha256", "policy_sha256"), {"policy": policy, "seed": seed})
    system = records.read(made)
    training = None
    if system.is_trained:
        training = _read_summary(made / "summary.json", TRAINING, {"method": policy, "seed": seed})
    return Run(policy, seed, summary, read_scores(folder / "scores.jsonl"), training, system.made_by)


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


def _same_data(runs: Sequence[Run], manifest: Any, artifacts: Path) -> str:
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


def read_recall(path: Path) -> dict[str, dict[str, float]]:
    """`recall.json` as dataset -> {"num_questions": n, "recall@3": x, ...}.

    The file is {"datasets": {name: {"num_questions": n, "<metric>@<k>": share, ...}}}.

    Raises:
        DataError: another shape, or a share outside [0, 1].
    """
    tree = read_json(path)
    datasets = tree.get("datasets") if isinstance(tree, dict) else None
    if not isinstance(datasets, dict) or not all(isinstance(row, dict) for row in datasets.values()):
        raise DataError(f"{path}: expected {{'datasets': {{name: object}}}}. Run the stage `recall` again.")
    return {name: _recall_row(row, f"{path}: {name}") for name, row in sorted(datasets.items())}


def _recall_row(row: Row, where: str) -> dict[str, float]:
    found = {key: value for key, value in row.items() if _AT.fullmatch(key)}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise DataError(f"{where}: {key}={value!r}, expected a number in [0, 1].")
    count = row.get("num_questions")
    if not isinstance(count, int):
        raise DataError(f"{where}: num_questions={count!r}, expected an integer.")
    return {"num_questions": count, **{key: float(found[key]) for key in sorted(found, key=_depth_order)}}


Compared = dict[str, dict[str, Row]]
"""Name of a retriever, or "b - a" -> dataset -> {"num_questions", "<metric>@<k>": {value, low, high}}."""


def read_retrievers(path: Path) -> tuple[Compared, Compared]:
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
    return (
        {name: _compared_rows(one["datasets"], 0, f"{path}: {name}") for name, one in retrievers.items()},
        {name: _compared_rows(one, -1, f"{path}: {name}") for name, one in differences.items()},
    )


def _compared_rows(rows: Mapping[str, Row], least: int, where: str) -> dict[str, Row]:
    return {dataset: _compared_row(row, least, f"{where}: {dataset}") for dataset, row in rows.items()}


def _compared_row(row: Row, least: int, where: str) -> Row:
    count = row.get("num_questions")
    if not isinstance(count, int):
        raise DataError(f"{where}: num_questions={count!r}, expected an integer.")
    names = sorted((key for key in row if _AT.fullmatch(key)), key=_depth_order)
    for name in names:
        figure: Row = row[name] if isinstance(row[name], dict) else {}
        low, value, high = (figure.get(key, math.nan) for key in ("low", "value", "high"))
        if (
            not all(isinstance(one, float | int) for one in (low, value, high))
            or not least <= low <= value <= high <= 1
        ):
            raise DataError(f"{where}: {name}={row[name]!r}, expected low <= value <= high in [{least}, 1].")
    return {"num_questions": count, **{name: row[name] for name in names}}


def _depth_order(name: str) -> tuple[bool, str, int]:
    """Recall first, then by name, then by depth."""
    metric, _, depth = name.partition("@")
    return metric != "recall", metric, int(depth)


# Cells


@dataclass(frozen=True)
class _Line:
    """One line of the table: a metric of one policy in one mode, by the columns (one a seed) it is the mean of."""

    policy: str
    seed: str
    mode: str
    metric: str
    columns: tuple[int, ...]
    policy_sha256: str


def _score_cells(runs: Sequence[Run], policies: Sequence[str], reference: str, num_resamples: int) -> Iterable[Cell]:
    columns: list[Mapping[str, float | None]] = []
    lines = [line for policy in policies for line in _lines(runs, policy, reference, columns)]
    found: list[list[Cell]] = [[] for _ in lines]
    sha = runs[0].summary["data_sha256"]
    over, bounds = [line.columns for line in lines], [_bounds(line.metric) for line in lines]
    for dataset, hops, ids in groups(runs[0].scores["greedy"]):
        table = [[_or_nan(column[question]) for column in columns] for question in ids]
        intervals = bootstrap_means(table, num_resamples, over=over, bounds=bounds)
        for line, cells, i in zip(lines, found, intervals, strict=True):
            keys = (line.policy, line.seed, dataset, hops, line.mode, line.metric)
            if i.num_questions:
                cells.append(Cell(*keys, i.mean, i.low, i.high, i.num_questions, sha, line.policy_sha256))
    return (cell for cells in found for cell in cells)


def _lines(
    runs: Sequence[Run], policy: str, reference: str, columns: list[Mapping[str, float | None]]
) -> Iterable[_Line]:
    """The lines of one system, all seeds together first; what they are the mean of is added to `columns`."""
    own = [run for run in runs if run.policy == policy]
    others = {run.seed: run for run in runs if run.policy == reference}
    hashes = [str(run.summary["policy_sha256"]) for run in own]
    parts = [(ALL, range(len(own)), ";".join(hashes)), *((str(r.seed), [i], hashes[i]) for i, r in enumerate(own))]
    places: dict[tuple[str, str], tuple[int, ...]] = {}
    for mode in _modes(own):
        by_name = {name: [_values(run, mode, name) for run in own] for name in METRICS}
        if policy != reference and mode in _modes(list(others.values())):
            for name in PAIRED:
                by_name[minus(name, reference)] = [
                    differences(_values(run, mode, name), _values(others[run.seed], mode, name)) for run in own
                ]
        for name, found in by_name.items():
            places[mode, name] = tuple(range(len(columns), len(columns) + len(found)))
            columns += found
    for label, members, sha in parts:
        for (mode, name), place in places.items():
            yield _Line(policy, label, mode, name, tuple(place[i] for i in members), sha)


def _bounds(metric: str) -> tuple[float, float] | None:
    """The scores a question can have, None where nothing limits them."""
    if MINUS in metric:
        return -1.0, 1.0
    return (0.0, 1.0) if metric in SHARES else None


def minus(metric: str, reference: str) -> str:
    """The name of a metric's difference to the reference, paired on seed and question: `em_minus_base`."""
    return f"{metric}{MINUS}{reference}"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _modes(runs: Sequence[Run]) -> list[str]:
    return [mode for mode in ("greedy", "sampled") if all(mode in run.scores for run in runs)]


def _values(run: Run, mode: str, metric: str) -> Values:
    return {row.question_id: METRICS[metric](row) for row in run.scores[mode]}


def groups(rows: Sequence[ScoreRow]) -> list[tuple[str, str, list[str]]]:
    """(dataset, hops, question ids) of every part of the table: all, each dataset, each hop count, and both."""
    datasets = sorted({row.dataset for row in rows})
    hops = sorted({row.hops for row in rows})
    keys: list[tuple[str, int | str]] = [(ALL, ALL), *((ALL, h) for h in hops), *((d, ALL) for d in datasets)]
    if len(datasets) > 1:
        keys += [(dataset, h) for dataset in datasets for h in hops]
    found = []
    for dataset, hop in keys:
        ids = [row.question_id for row in rows if dataset in (ALL, row.dataset) and hop in (ALL, row.hops)]
        if ids:
            found.append((dataset, str(hop), ids))
    return found


def _training_cells(runs: Sequence[Run], policies: Sequence[str]) -> Iterable[Cell]:
    for policy in policies:
        trained = [run for run in runs if run.policy == policy and run.training is not None]
        for part, seed in [(trained, ALL), *(([run], str(run.seed)) for run in trained)] if trained else []:
            hashes = ";".join(run.summary["policy_sha256"] for run in part)
            for name in TRAINING:
                mean = sum(run.training[name] for run in part if run.training) / len(part)
                sha = part[0].summary["data_sha256"]
                yield Cell(policy, seed, ALL, ALL, "training", name, mean, None, None, None, sha, hashes)


def _recall_cells(recall: Mapping[str, Mapping[str, float]], data_sha256: str) -> Iterable[Cell]:
    for dataset, row in recall.items():
        for name, value in row.items():
            if name != "num_questions":
                count = int(row["num_questions"])
                yield Cell("retriever", ALL, dataset, ALL, "search", name, value, None, None, count, data_sha256, "")


def _compared_cells(compared: Compared, data_sha256: str) -> Iterable[Cell]:
    for name, datasets in compared.items():
        for dataset, row in datasets.items():
            keys = (compared_policy(name), ALL, dataset, ALL, "search")
            for metric, figure in row.items():
                if metric != "num_questions":
                    ends = (float(figure["value"]), float(figure["low"]), float(figure["high"]))
                    yield Cell(*keys, metric, *ends, row["num_questions"], data_sha256, "")


def compared_policy(name: str) -> str:
    """What stands in the column `policy` for a retriever that was compared, or for a difference."""
    return f"retriever:{name}"


# Writing


def write_csv(path: Path, cells: Iterable[Cell]) -> None:
    """Write `results.csv`: UTF-8, LF, numbers with six decimals, text quoted where CSV needs it."""
    with replacing(path) as file:
        file.write((",".join(field.name for field in fields(Cell)) + "\n").encode())
        for cell in cells:
            file.write((",".join(map(_csv, astuple(cell))) + "\n").encode())


def _csv(value: str | float | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.6f}"
        return "0.000000" if text == "-0.000000" else text
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace('"', '""') + '"' if re.search(r'[",\r\n]', value) else value


def write_markdown(path: Path, results: Results) -> None:
    """Write `results.md`: the headline table and its breakdowns; no time, commit or run id."""
    with replacing(path) as file:
        file.write(markdown(results).encode())


def coverage(seeds: Sequence[int]) -> str:
    """What the intervals cover, in words."""
    if len(seeds) == 1:
        return "over questions; one seed says nothing about others"
    return (
        f"over questions and the {len(seeds)} seeds, the wider of two: both resampled, and Student's t over the means "
        "of the seeds"
    )


def markdown(results: Results) -> str:
    """The text of `results.md`."""
    runs = results.runs
    num_questions = len(runs[0].scores["greedy"])
    parts = [
        "# Results",
        f"{num_questions} held-out questions, seeds {', '.join(map(str, results.seeds))}; "
        f"data `{runs[0].summary['data_sha256'][:12]}`. Greedy play unless marked. Brackets: 95% interval "
        f"{coverage(results.seeds)}. Differences are paired on seed and question. "
        "Every number, seed by seed, is in `results.csv`.",
        *failed_searches(results),
        *(f"{line[0].upper()}{line[1:]}." for line in fault_lines(results.manifest)),
        _markdown_table(*_headline(results)),
        "## Exact match by number of hops",
        _markdown_table(*_breakdown(results, "hops", sorted({c.hops for c in results.cells} - {ALL}, key=int))),
        "## Exact match by dataset",
        _markdown_table(*_breakdown(results, "dataset", sorted({row.dataset for row in runs[0].scores["greedy"]}))),
        "## Training cost, mean over seeds",
        _markdown_table(*_costs(results)),
        "## Retriever alone, the question as query",
        _markdown_table(*_recall_table(results)),
        *(
            ["## Retrievers compared, the question as query", _markdown_table(*compared_table(results))]
            * bool(results.retrievers)
        ),
        "## Augmentation",
        augmentation_line(results.augmentation),
        _markdown_table(*funnel(results.augmentation)),
        *(p for s in results.sections for p in (f"## {s.title}", s.lead, _markdown_table(s.header, s.rows))),
    ]
    return "\n\n".join(parts) + "\n"


def failed_searches(results: Results) -> list[str]:
    """One line that names each policy with failed searches, in any mode and seed; no line where none failed."""
    parts = []
    for policy in results.policies:
        counts = []
        for mode in ("greedy", "sampled"):
            rows = [row for run in results.runs if run.policy == policy for row in run.scores.get(mode, ())]
            failed = sum(row.status == "failed" for row in rows)
            counts += [f"{failed:,} of {len(rows):,} {mode}"] if failed else []
        if counts:
            parts.append(f"{results.title(policy)} {', '.join(counts)}")
    return [f"Searches failed, and these questions count as wrong: {'; '.join(parts)}."] if parts else []


def _headline(results: Results) -> tuple[list[str], list[list[str]]]:
    gain = minus("em", results.reference)
    header = ["policy", "seeds", "questions", "EM", f"EM - {results.title(results.reference)}", "EM, seed by seed"]
    header += ["F1", "subEM", "EM sampled", "searches", "valid actions", "gold recall", "tokens"]
    rows = []
    for policy in results.policies:
        em = results.find(policy, "em")
        rows.append(
            [
                results.title(policy),
                str(len(results.seeds)),
                str(em.num_questions if em else 0),
                show(em),
                show(results.find(policy, gain), signed=True),
                ", ".join(show(results.find(policy, "em", seed), interval=False) for seed in results.seeds),
                show(results.find(policy, "f1")),
                show(results.find(policy, "subem")),
                show(results.find(policy, "em", mode="sampled")),
                show(results.find(policy, "searches"), digits=2, interval=False),
                show(results.find(policy, "valid_action_rate"), interval=False),
                show(results.find(policy, "recall"), interval=False),
                show(results.find(policy, "generated_tokens"), digits=1, interval=False),
            ]
        )
    return header, rows


def _breakdown(results: Results, key: str, values: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    first = results.policies[0]
    counts = {value: results.find(first, "em", **{key: value}) for value in values}
    header = [key, "questions", *map(results.title, results.policies)]
    rows = []
    for value, cell in counts.items():
        found = [show(results.find(policy, "em", **{key: value})) for policy in results.policies]
        rows.append([value, str(cell.num_questions if cell else 0), *found])
    return header, rows


def _costs(results: Results) -> tuple[list[str], list[list[str]]]:
    header = ["policy", *(name.replace("_", " ") for name in TRAINING)]
    rows = []
    for policy in results.policies:
        found = [results.find(policy, name, mode="training") for name in TRAINING]
        if any(found):
            rows.append([results.title(policy), *(f"{cell.value:,.0f}" if cell else "" for cell in found)])
    return header, rows


def _recall_table(results: Results) -> tuple[list[str], list[list[str]]]:
    names = recall_metrics(results)
    rows = [
        [dataset, str(int(row["num_questions"])), *(f"{row[name]:.3f}" if name in row else "" for name in names)]
        for dataset, row in results.recall.items()
    ]
    return ["dataset", "questions", *names], rows


COMPARED = ("recall@3", "recall@5", "recall@10", "all_gold@10", "answer@10")
"""The metrics of compared retrievers that a reader is shown; the others are in `results.csv`."""


def compared_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """One line a dataset and retriever or difference, in that order, with intervals."""
    rows = []
    for dataset in sorted({c.dataset for c in results.cells if c.policy in map(compared_policy, results.retrievers)}):
        for name in (*results.retrievers, *results.differences):
            found = [results.find(compared_policy(name), metric, dataset=dataset, mode="search") for metric in COMPARED]
            count = next((cell.num_questions for cell in found if cell), None)
            if count is not None:
                signed = name in results.differences
                rows.append([dataset, name, str(count), *(show(cell, signed=signed) for cell in found)])
    return ["dataset", "retriever", "questions", *COMPARED], rows


def recall_metrics(results: Results) -> list[str]:
    """Names of the retriever's metrics in any dataset, in the order they are shown."""
    return sorted({name for row in results.recall.values() for name in row if "@" in name}, key=_depth_order)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def _markdown_cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def show(cell: Cell | None, digits: int = 3, interval: bool = True, signed: bool = False) -> str:
    """One cell for a reader: `0.512 [0.471, 0.553]`; empty if there is no such number."""
    if cell is None:
        return ""
    form = f"{'+' if signed else ''}.{digits}f"
    text = format(cell.value, form)
    if interval and cell.low is not None and cell.high is not None:
        text += f" [{format(cell.low, form)}, {format(cell.high, form)}]"
    return text


def terminal(results: Results, ledger: Mapping[str, Row] | None = None) -> str:
    """The short table at the end of a run: every policy with interval, difference, seeds and cost a seed.

    Seconds come from `ledger` (stage -> its entry) and are left blank where a stage has not run on this machine.
    """
    num_questions = len(results.runs[0].scores["greedy"])
    gain = f"EM - {results.title(results.reference)}"
    header = ["policy", "EM [95% interval]", gain, "seeds", "searches/q", "train tokens", "train s"]
    rows = []
    for policy in results.policies:
        cost = results.find(policy, "generated_tokens", mode="training")
        seconds = making_seconds(results, policy, ledger or {})
        rows.append(
            [
                results.title(policy),
                show(results.find(policy, "em")),
                show(results.find(policy, minus("em", results.reference)), signed=True) or "-",
                ",".join(map(str, results.seeds)),
                show(results.find(policy, "searches"), digits=2, interval=False),
                f"{cost.value:,.0f}" if cost else "-",
                f"{seconds:,.0f}" if seconds is not None else "-",
            ]
        )
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(_pad(text, widths[i], i) for i, text in enumerate(line)).rstrip() for line in [header, *rows]]
    rule = "-" * max(map(len, lines))
    note = f"{num_questions} held-out questions, greedy; tokens and seconds are means over seeds."
    return "\n".join([lines[0], rule, *lines[1:], rule, note, *failed_searches(results)])


def _pad(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def making_seconds(results: Results, policy: str, ledger: Mapping[str, Row]) -> float | None:
    """Mean seconds of the stages that made what this system plays, None unless the ledger has every seed."""
    seconds = [ledger.get(run.made_by, {}).get("seconds") for run in results.runs if run.policy == policy]
    numbers = [float(value) for value in seconds if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if len(numbers) == len(results.seeds) else None
