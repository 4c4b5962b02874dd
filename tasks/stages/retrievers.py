"""Stage `retrievers`: builds and measures each retriever that `compare_retrievers` names, on the questions as queries.

The indexes are in the stage's scratch folder while it runs. Encoded passages are shared with the stage `index` and are
kept. The result is `artifacts/retrievers.json`; with an empty list it is an empty table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks import retrieval, store
from tasks.data.records import read_questions
from tasks.evaluate.statistics import bootstrap_means
from tasks.retrieval import Retriever, recall
from tasks.runner import Context, main
from tasks.store import Row
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
OUT = Path("artifacts/retrievers.json")
NUM_BOOTSTRAP = 2000


HELD_OUT = ", held out"


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        retrievers: name -> backend and its settings, in the order of `compare_retrievers`.
    """

    retrievers: dict[str, dict[str, Any]]


def settings(run: RunSettings) -> Settings:
    """The retrievers that `compare_retrievers` names."""
    return Settings({name: run.retriever(name) for name in run.params.compare_retrievers})


def loads(settings: Settings) -> dict[str, Any]:
    """The settings of each backend, which lie in its module."""
    return {name: retrieval.settings_of(tree, f"retrievers: {name}") for name, tree in settings.retrievers.items()}


def body(ctx: Context[Settings]) -> None:
    """Write `artifacts/retrievers.json`.

    `{"retrievers": {name: {"backend", "settings_digest", "datasets": {dataset: row}}}, "differences": {"b - a":
    {dataset: row}}, "config_sha256": hash of the settings}`, where a row holds `num_questions` and for each figure of
    `tasks.retrieval.recall.recall_table` its `{"value", "low", "high"}`, the ends of a 95% bootstrap interval over
    questions. A dataset with training questions has a second row `<dataset>, held out` without them, because settings
    may have been chosen on training questions. Differences are paired by question; each retriever is compared with
    those that `compare_retrievers` names before it.
    """
    compared = loads(ctx.settings)
    rows = {name: _rows(ctx, name, compared[name]) for name in compared}
    table = {name: _described(ctx.settings.retrievers[name], of_retriever) for name, of_retriever in rows.items()}
    differences = {
        f"{second} - {first}": {
            dataset: _figures(rows[second][dataset], rows[first][dataset]) for dataset in rows[first]
        }
        for first, second in itertools.combinations(rows, 2)
    }
    written = {"retrievers": table, "differences": differences, "config_sha256": ctx.config_sha256}
    store.write_json(ctx.root / OUT, written)

    for name, datasets in [*((name, entry["datasets"]) for name, entry in table.items()), *differences.items()]:
        for dataset, row in datasets.items():
            figures = {key: figure["value"] for key, figure in row.items() if key != "num_questions"}
            print(
                f"{name}, {dataset}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True
            )
            if name in table:  # MLflow refuses "@" in the name of a metric.
                ctx.log(0, {f"{name}/{dataset}/{key}".replace("@", "_at_"): value for key, value in figures.items()})
    measured = next(iter(table.values()))["datasets"].items() if table else ()
    ctx.track_data("retrievers", sum(row["num_questions"] for name, row in measured if not name.endswith(HELD_OUT)))


def _rows(ctx: Context[Settings], name: str, settings: Any) -> dict[str, list[recall.Row]]:
    """The figures of every question, by dataset."""
    retriever = _index(ctx, name, settings)
    questions = read_questions(ctx.root / DATA / "questions.jsonl")
    rows = recall.question_rows(questions, retriever, progress=ctx.progress, groups=_groups)
    return {
        dataset: of_dataset
        for dataset, of_dataset in rows.items()
        if not dataset.endswith(HELD_OUT) or len(of_dataset) < len(rows[dataset.removesuffix(HELD_OUT)])
    }


def _groups(question: Question) -> tuple[str, ...]:
    held_out = question.dataset + HELD_OUT
    return (question.dataset,) if question.split == "train" else (question.dataset, held_out)


def _described(settings: Row, rows: dict[str, list[recall.Row]]) -> Row:
    return {
        "backend": settings["backend"],
        "settings_digest": store.digest(settings),
        "datasets": {dataset: _figures(of_dataset) for dataset, of_dataset in rows.items()},
    }


def _index(ctx: Context[Settings], name: str, settings: Any) -> Retriever:
    """The index that an earlier attempt has finished, else a new one."""
    corpus, out = ctx.root / DATA / "corpus.jsonl", ctx.scratch / "index" / name
    return retrieval.open_or_build(corpus, out, settings, ctx.root / retrieval.SCRATCH, ctx.progress)


def _figures(rows: list[recall.Row], baseline: list[recall.Row] | None = None) -> Row:
    """Means of the rows, or of their differences from a baseline on the same questions."""
    names = sorted(rows[0])
    table = np.array([[row[name] for name in names] for row in rows])  # [questions, figures]
    if baseline is not None:
        table -= np.array([[row[name] for name in names] for row in baseline])
    bounds = (0.0 if baseline is None else -1.0, 1.0)
    intervals = bootstrap_means(table, NUM_BOOTSTRAP, bounds=[bounds] * len(names))
    figures = {}
    for name, figure in zip(names, intervals, strict=True):
        low, high = (None, None) if figure.ends is None else (round(end, 6) for end in figure.ends)
        figures[name] = {"value": round(figure.mean, 6), "low": low, "high": high}
    return {"num_questions": len(rows), **figures}


if __name__ == "__main__":
    main("retrievers", body, Settings, clean=True)
