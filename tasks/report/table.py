"""The result table: from the artifacts of finished stages to `results.csv` and `results.md`.

It plays no question and computes no score; it averages and attaches intervals. `results.csv` and `results.md` are
functions of the artifacts alone: what was measured on one machine (seconds, run ids, commits) lives in the ledger and
appears only on the page and at the end of a run. `tasks.report.terminal` fits the table to a terminal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from tasks.data.notes import fault_lines, notes
from tasks.evaluate.statistics import MIN_SEEDS, QUESTIONS, Interval, Values, bootstrap_means, differences, shown
from tasks.records.scores import ScoreRow
from tasks.report.artifacts import (
    TRAINING,
    Compared,
    Run,
    depth_order,
    read_recall,
    read_retrievers,
    read_run,
    same_data,
)
from tasks.report.augmentation import augmentation_line, funnel, read_augmentation
from tasks.report.terminal import BY_DATASET
from tasks.store import Row, read_json, replacing
from tasks.types import ALL as ALL

SHARES = (
    "em", "f1", "subem", "recall", "answer_in_passage", "valid_action_rate", "answered", "failed",
)  # fmt: skip
"""Metrics between 0 and 1."""
MINUS = "_minus_"
PAIRED = (
    "em",
    "f1",
    "subem",
    "recall",
    "answer_in_passage",
)  # Metrics that are also reported as a difference to the reference.


def _valid_action_rate(row: ScoreRow) -> float | None:
    return row.valid_actions / row.actions if row.actions else None


METRICS: dict[str, Callable[[ScoreRow], float | None]] = {
    "em": lambda row: row.em,
    "f1": lambda row: row.f1,
    "subem": lambda row: row.subem,
    "recall": lambda row: row.recall,
    "answer_in_passage": lambda row: row.answer_in_passage,
    "searches": lambda row: row.searches,
    "valid_action_rate": _valid_action_rate,
    "answered": lambda row: float(row.status == "answered"),
    "failed": lambda row: float(row.status == "failed"),
    "generated_tokens": lambda row: row.generated_tokens,
    "prefill_tokens": lambda row: row.prefill_tokens,
}
"""Metric -> value of one row of `scores.jsonl`; None where it does not apply (no gold passage, no action)."""

TOKENS = ("generated_tokens", "prefill_tokens")
"""Metrics of systems with tokens of their own; one that asks a service has none, and no cell."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that a spreadsheet would take for a formula."""


@dataclass(frozen=True)
class Cell:
    """One row of `results.csv`, in the order of its columns; None is written as nothing.

    The hashes are those of the data, of the policies, and of the settings of the stages that measured the number: of
    the training for metrics of training, else of the evaluation or of the retriever's stage. Hashes of several runs are
    in the order of the seeds, with semicolons between them.

    `low` and `high` are None where no interval can be given, or where it would exclude nothing that could happen;
    `interval_over` says what varies in it: questions, seeds, or both.
    """

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
    config_sha256: str
    interval_over: str = ""

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, None where there is none."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def of_interval(found: Interval) -> tuple[float, float | None, float | None]:
    """Value, low and high of a cell."""
    return (found.mean, *(found.ends or (None, None)))


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
        has_diagonal: whether the chart shows where both axes are equal.
        is_on_page_only: whether the Markdown file leaves it out, because it is long.
    """

    id: str
    title: str
    lead: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    series: Sequence[Row] = ()
    axes: tuple[str, str] = ("", "")
    has_diagonal: bool = False
    is_on_page_only: bool = False


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
        validation_split: the split whose questions are played during training.
        num_resamples: behind each interval over questions.
        notes: what a reader must know before any number, a sentence each.
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
    validation_split: str = ""
    num_resamples: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_few(self) -> bool:
        """Whether there are too few seeds for an interval over seeds."""
        return len(self.seeds) < MIN_SEEDS

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
    data_sha256 = same_data(runs, manifest, artifacts)
    recall = read_recall(artifacts / "recall.json")
    found = read_retrievers(artifacts / "retrievers.json")

    cells = [
        *_score_cells(runs, systems, reference, num_resamples),
        *_training_cells(runs, systems),
        *_recall_cells(recall.datasets, (data_sha256, "", recall.config_sha256)),
        *_compared_cells({**found.retrievers, **found.differences}, (data_sha256, "", found.config_sha256)),
    ]
    return Results(
        policies=tuple(systems),
        seeds=tuple(seeds),
        reference=reference,
        runs=runs,
        cells=tuple(cells),
        recall=recall.datasets,
        retrievers=tuple(found.retrievers),
        differences=tuple(found.differences),
        validation=read_json(artifacts / "validation.json"),
        manifest=manifest,
        augmentation=read_augmentation(artifacts / "augment" / "summary.json"),
        titles=titles or {},
        num_resamples=num_resamples,
        notes=tuple(notes(manifest)),
    )


# Cells


Origin = tuple[str, str, str]
"""Hashes of data, policies and settings: the last columns of `results.csv`."""


def origin(runs: Sequence[Run], is_training: bool = False) -> Origin:
    """The hashes behind a number that was measured in the evaluations of these runs, or in their training."""
    summaries = [run.training or {} if is_training else run.summary for run in runs]
    policies, settings = (";".join(str(one[key]) for one in summaries) for key in ("policy_sha256", "config_sha256"))
    return str(runs[0].summary["data_sha256"]), policies, settings


@dataclass(frozen=True)
class _Line:
    """One line of the table: a metric of one policy in one mode, the mean of these columns, one for each seed."""

    policy: str
    seed: str
    mode: str
    metric: str
    columns: tuple[int, ...]
    origin: Origin


def _score_cells(runs: Sequence[Run], policies: Sequence[str], reference: str, num_resamples: int) -> Iterable[Cell]:
    columns: list[Mapping[str, float | None]] = []
    lines = [line for policy in policies for line in _lines(runs, policy, reference, columns)]
    found: list[list[Cell]] = [[] for _ in lines]
    over, bounds = [line.columns for line in lines], [_bounds(line.metric) for line in lines]
    for dataset, hops, ids in groups(runs[0].scores["greedy"]):
        table = [[_nan_if_none(column[question]) for column in columns] for question in ids]
        intervals = bootstrap_means(table, num_resamples, over=over, bounds=bounds)
        for line, cells, i in zip(lines, found, intervals, strict=True):
            keys = (line.policy, line.seed, dataset, hops, line.mode, line.metric)
            if i.num_questions and not (line.metric in TOKENS and i.mean == 0):
                cells.append(Cell(*keys, *of_interval(i), i.num_questions, *line.origin, i.over))
    return (cell for cells in found for cell in cells)


def _lines(
    runs: Sequence[Run], policy: str, reference: str, columns: list[Mapping[str, float | None]]
) -> Iterable[_Line]:
    """The lines of one system, all seeds together first; the columns that they average are appended to `columns`."""
    own = [run for run in runs if run.policy == policy]
    others = {run.seed: run for run in runs if run.policy == reference}
    parts = [(ALL, range(len(own))), *((str(run.seed), [i]) for i, run in enumerate(own))]
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
    for label, members in parts:
        behind = origin([own[i] for i in members])
        for (mode, name), place in places.items():
            yield _Line(policy, label, mode, name, tuple(place[i] for i in members), behind)


def _bounds(metric: str) -> tuple[float, float] | None:
    """The least and the largest score of a question; None for a metric without limits."""
    if MINUS in metric:
        return -1.0, 1.0
    return (0.0, 1.0) if metric in SHARES else None


def minus(metric: str, reference: str) -> str:
    """The name of a metric's difference to the reference, paired on seed and question: `em_minus_base`."""
    return f"{metric}{MINUS}{reference}"


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


def _modes(runs: Sequence[Run]) -> list[str]:
    return [mode for mode in ("greedy", "sampled") if all(mode in run.scores for run in runs)]


def _values(run: Run, mode: str, metric: str) -> Values:
    return {row.question_id: METRICS[metric](row) for row in run.scores[mode]}


def groups(rows: Sequence[ScoreRow]) -> list[tuple[str, str, list[str]]]:
    """(dataset, hops, question ids) of every part of the table: all, each hop count, each dataset, and each pair."""
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
            behind = origin(part, is_training=True)
            for name in TRAINING:
                mean = sum(run.training[name] for run in part if run.training) / len(part)
                yield Cell(policy, seed, ALL, ALL, "training", name, mean, None, None, None, *behind)


def _recall_cells(recall: Mapping[str, Mapping[str, float]], behind: Origin) -> Iterable[Cell]:
    for dataset, row in recall.items():
        for name, value in row.items():
            if name != "num_questions":
                count = int(row["num_questions"])
                yield Cell("retriever", ALL, dataset, ALL, "search", name, value, None, None, count, *behind)


def _compared_cells(compared: Compared, behind: Origin) -> Iterable[Cell]:
    for name, datasets in compared.items():
        for dataset, row in datasets.items():
            keys = (compared_policy(name), ALL, dataset, ALL, "search")
            for metric, figure in row.items():
                if metric != "num_questions":
                    ends = (figure["low"], figure["high"])
                    over = "" if None in ends else QUESTIONS
                    value = float(figure["value"])
                    yield Cell(*keys, metric, value, *ends, row["num_questions"], *behind, over)


def compared_policy(name: str) -> str:
    """The entry of the column `policy` for a retriever that was compared, or for a difference of two."""
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
    if value.startswith(FORMULA):  # Behind an apostrophe a spreadsheet shows the text and computes nothing.
        value = f"'{value}"
    return '"' + value.replace('"', '""') + '"' if re.search(r'[",\r\n]', value) else value


def write_markdown(path: Path, results: Results) -> None:
    """Write `results.md`: the headline table and its breakdowns; no time, commit or run id."""
    with replacing(path) as file:
        file.write(markdown(results).encode())


def coverage(results: Results) -> str:
    """What the intervals cover and how they were made, in words: no hash in the table names the resamples."""
    times = f"resampled {results.num_resamples:,} times"
    if len(results.seeds) == 1:
        return f"over questions, {times}; one seed says nothing about others"
    if results.is_few:
        return (
            f"over questions, {times}, with both seeds together; it does not include the variance between training "
            "runs, about which two seeds say nearly nothing"
        )
    return (
        f"over questions and the {len(results.seeds)} seeds, the wider of two: both {times}, and Student's t over the "
        "means of the seeds"
    )


def markdown(results: Results) -> str:
    """The text of `results.md`."""
    runs = results.runs
    parts = [
        "# Results",
        f"{_markdown_cell(asked(results))}, seeds {', '.join(map(str, results.seeds))}; "
        f"data `{runs[0].summary['data_sha256'][:12]}`. Greedy play unless marked. Brackets: 95% interval "
        f"{coverage(results)}. Without brackets: none that would exclude anything. Differences are paired on seed and "
        "question. "
        "Every number, seed by seed, is in `results.csv`.",
        *map(_markdown_cell, results.notes),
        *chosen_on(results),
        *failed_searches(results),
        *(f"{line[0].upper()}{line[1:]}." for line in fault_lines(results.manifest)),
        _markdown_table(*_headline(results)),
        "## Exact match by number of hops",
        _markdown_table(*_breakdown(results, "hops", sorted({c.hops for c in results.cells} - {ALL}, key=int))),
        *_by_dataset(results),
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
        *([_markdown_table(*steps)] if (steps := funnel(results.augmentation))[1] else []),
        *(part for section in results.sections if not section.is_on_page_only for part in _markdown_of(section)),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown_of(section: Section) -> tuple[str, str, str]:
    return f"## {section.title}", section.lead, _markdown_table(section.header, section.rows)


def asked(results: Results) -> str:
    """How many questions every system played; they are called held-out where they chose no policy."""
    rows = results.runs[0].scores["greedy"]
    kind = "questions" if chosen_on(results) else "held-out questions"
    return f"{len(rows):,} {kind}{_of_splits(results.manifest, rows)}"


def _of_splits(manifest: Any, rows: Sequence[ScoreRow]) -> str:
    """Which split of which dataset was played; nothing where the questions are generated."""
    if not isinstance(manifest, dict) or manifest.get("kind") != "folder":
        return ""
    by_split: dict[str, set[str]] = {}
    for row in rows:
        by_split.setdefault(row.split, set()).add(row.dataset)
    parts = (f"{split} of {', '.join(sorted(names))}" for split, names in sorted(by_split.items(), reverse=True))
    return f" ({'; '.join(parts)})"


def chosen_on(results: Results) -> list[str]:
    """One line where the played questions are of the split that chose a policy's best step; else no line."""
    rows = results.runs[0].scores["greedy"]
    count = sum(row.split == results.validation_split for row in rows)
    chosen = [p for p in results.policies if any(run.policy == p and _is_chosen(run) for run in results.runs)]
    if not count or not chosen:
        return []
    return [
        f"{count:,} of {len(rows):,} questions are of the split {results.validation_split}, on which the best step of "
        f"each trained policy was chosen: results on them, and on all questions together, are too high for "
        f"{', '.join(map(results.title, chosen))}."
    ]


def _is_chosen(run: Run) -> bool:
    """Whether the policy is that of the best step by validation, and not that of the last step."""
    settings: Row = (run.training or {}).get("settings", {})
    return bool(settings.get("train", {}).get("select") == "best")


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
    """The result table; with too few seeds for an interval over them the paired difference first, and each seed."""
    header = ["policy", "seeds", "questions", *_compared_header(results)]
    header += ["F1", "subEM", "EM sampled", "searches", "valid actions", "answer in passage", "gold recall", "tokens"]
    rows = []
    for policy in results.policies:
        em = results.find(policy, "em")
        rows.append(
            [
                results.title(policy),
                str(len(results.seeds)),
                str(em.num_questions if em else 0),
                *_compared_cells_of(results, policy),
                show(results.find(policy, "f1")),
                show(results.find(policy, "subem")),
                show(results.find(policy, "em", mode="sampled")),
                show(results.find(policy, "searches"), digits=2, interval=False),
                show(results.find(policy, "valid_action_rate"), interval=False),
                show(results.find(policy, "answer_in_passage"), interval=False),
                show(results.find(policy, "recall"), interval=False),
                _tokens(results.find(policy, "generated_tokens")),
            ]
        )
    return header, rows


def _compared_header(results: Results) -> list[str]:
    gain = f"EM - {results.title(results.reference)}"
    if results.is_few:
        one_each = [f"{name}, seed {seed}" for name in (gain, "EM") for seed in results.seeds]
        return [gain, *one_each, "EM"] if len(results.seeds) > 1 else [gain, "EM"]
    return ["EM", gain, "EM, seed by seed"]


def _compared_cells_of(results: Results, policy: str) -> list[str]:
    """Exact match and its difference to the reference, under `_compared_header`."""
    name = minus("em", results.reference)
    em, gain = show(results.find(policy, "em")), show(results.find(policy, name), signed=True)
    if not results.is_few:
        seeds = (show(results.find(policy, "em", seed), interval=False) for seed in results.seeds)
        return [em, gain, ", ".join(seeds)]
    if len(results.seeds) == 1:
        return [gain, em]
    gains = [show(results.find(policy, name, seed), signed=True) for seed in results.seeds]
    return [gain, *gains, *(show(results.find(policy, "em", seed)) for seed in results.seeds), em]


def _breakdown(results: Results, key: str, values: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    first = results.policies[0]
    counts = {value: results.find(first, "em", **{key: value}) for value in values}
    header = [key, "questions", *map(results.title, results.policies)]
    rows = []
    for value, cell in counts.items():
        found = [show(results.find(policy, "em", **{key: value})) for policy in results.policies]
        rows.append([value, str(cell.num_questions if cell else 0), *found])
    return header, rows


def _by_dataset(results: Results) -> tuple[str, ...]:
    """One line for each dataset and policy; nothing where all questions are of one dataset."""
    datasets = sorted({row.dataset for row in results.runs[0].scores["greedy"]})
    header = ["dataset", "policy", "EM", "F1", "searches", "gold recall", "tokens", "answer in passage", "questions"]
    rows = []
    for dataset, policy in itertools.product(datasets, results.policies):
        em, f1, searches, recall, tokens, found = (
            results.find(policy, metric, dataset=dataset)
            for metric in ("em", "f1", "searches", "recall", "generated_tokens", "answer_in_passage")
        )
        rows.append(
            [
                dataset,
                results.title(policy),
                show(em),
                show(f1),
                show(searches, digits=2, interval=False),
                show(recall, interval=False),
                _tokens(tokens),
                show(found, interval=False),
                str(em.num_questions if em else 0),
            ]
        )
    return (BY_DATASET, _markdown_table(header, rows)) if len(datasets) > 1 else ()


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
    """One line for each dataset and retriever or difference, in that order, with intervals."""
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
    return sorted({name for row in results.recall.values() for name in row if "@" in name}, key=depth_order)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def _markdown_cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def show(cell: Cell | None, digits: int = 3, interval: bool = True, signed: bool = False) -> str:
    """One cell for a reader: `0.512 [0.471, 0.553]`; empty if there is no such number."""
    if cell is None:
        return ""
    return shown(cell.value, cell.ends if interval else None, digits, signed)


def _tokens(cell: Cell | None) -> str:
    """Tokens that a policy generated; empty for a system that is none, whose services count theirs."""
    return show(cell, digits=1, interval=False) if cell is not None and cell.value else ""


def making_seconds(results: Results, policy: str, ledger: Mapping[str, Row]) -> float | None:
    """Mean seconds of the stages that made what this system plays, None unless the ledger has every seed."""
    seconds = [ledger.get(run.made_by, {}).get("seconds") for run in results.runs if run.policy == policy]
    numbers = [float(value) for value in seconds if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if len(numbers) == len(results.seeds) else None
