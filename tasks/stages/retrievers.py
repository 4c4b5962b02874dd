"""Stage `retrievers`: builds and measures each retriever that `compare_retrievers` names, on the questions as queries.

The indexes live in the stage's scratch folder while it runs; encoded passages are shared with the stage `index` and
stay. The result is `artifacts/retrievers.json`. An empty list writes an empty table at once.
"""

from __future__ import annotations

from pathlib import Path

from tasks import conf, retrieval, store
from tasks.data.records import read_questions
from tasks.evaluate.statistics import bootstrap_means
from tasks.retrieval import Retriever
from tasks.retrieval.recall import question_rows
from tasks.stages.runner import Context, run
from tasks.store import DataError, Row

DATA = Path("artifacts/data")
OUT = Path("artifacts/retrievers.json")
NUM_BOOTSTRAP = 2000


def body(ctx: Context) -> None:
    """Write `artifacts/retrievers.json`.

    `{"retrievers": {name: {"backend", "settings_digest", "datasets": {dataset: row}}}}`, where a row holds
    `num_questions` and for each figure of `tasks.retrieval.recall.recall_table` its `{"value", "low", "high"}`,
    the ends of a 95% bootstrap interval over questions.
    """
    table = {name: _measure(ctx, name) for name in ctx.params.compare_retrievers}
    store.write_json(ctx.root / OUT, {"retrievers": table})
    for name, found in table.items():
        for dataset, row in found["datasets"].items():
            figures = {key: figure["value"] for key, figure in row.items() if key != "num_questions"}
            print(
                f"{name}, {dataset}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True
            )
            # MLflow refuses "@" in the name of a metric.
            ctx.log(0, {f"{name}/{dataset}/{key}".replace("@", "_at_"): value for key, value in figures.items()})
    measured = next(iter(table.values()))["datasets"].values() if table else ()
    ctx.track_data("retrievers", sum(row["num_questions"] for row in measured))


def _measure(ctx: Context, name: str) -> Row:
    settings = retrieval.load_settings(name, ctx.root)
    retriever = _index(ctx, name, settings)
    questions = read_questions(ctx.root / DATA / "questions.jsonl")
    rows = question_rows(questions, retriever, progress=ctx.progress)
    return {
        "backend": settings.backend,
        "settings_digest": store.digest(conf.plain(settings)),
        "datasets": {dataset: _figures(found) for dataset, found in rows.items()},
    }


def _index(ctx: Context, name: str, settings: object) -> Retriever:
    """The index of an earlier attempt if that finished it, else a new one."""
    corpus, out = ctx.root / DATA / "corpus.jsonl", ctx.scratch / "index" / name
    try:
        return retrieval.open_retriever(out, corpus)
    except DataError:
        print(f"{name}: building the index", flush=True)
        retrieval.build(corpus, out, settings, ctx.root / retrieval.SCRATCH, ctx.progress)
        return retrieval.open_retriever(out, corpus)


def _figures(rows: list[dict[str, float]]) -> Row:
    names = sorted(rows[0])
    table = [[row[name] for name in names] for row in rows]  # [questions, figures]
    intervals = bootstrap_means(table, NUM_BOOTSTRAP, bounds=[(0.0, 1.0)] * len(names))
    figures = {
        name: {"value": round(one.mean, 6), "low": round(one.low, 6), "high": round(one.high, 6)}
        for name, one in zip(names, intervals, strict=True)
    }
    return {"num_questions": len(rows), **figures}


if __name__ == "__main__":
    run("retrievers", body, clean=True)
