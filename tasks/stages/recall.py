"""Stage `recall`: measures the index on the questions whose gold passages are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import retrieval, store
from tasks.data.records import read_questions
from tasks.retrieval.recall import recall_table
from tasks.runner import Context, main

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
INDEX = Path("artifacts/index")
OUT = Path("artifacts/recall.json")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        retriever: settings of the backend that opens the index.
    """

    retriever: dict[str, Any]


def settings(run: RunSettings) -> Settings:
    """The retriever of this run."""
    return Settings(run.retriever())


def loads(settings: Settings) -> Any:
    """The settings of the backend, which lie in its module."""
    return retrieval.settings_of(settings.retriever, "retriever")


def body(ctx: Context[Settings]) -> None:
    """Write `artifacts/recall.json`.

    `{"datasets": {name: {num_questions, recall@k, all_gold@10, answer@k}}, "config_sha256": hash of the settings}`.
    """
    retriever = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    table = recall_table(read_questions(ctx.root / DATA / "questions.jsonl"), retriever, progress=ctx.progress)
    store.write_json(ctx.root / OUT, {"datasets": table, "config_sha256": ctx.config_sha256})
    ctx.track_data("recall", sum(int(row["num_questions"]) for row in table.values()))
    # MLflow refuses "@" in the name of a metric.
    named = {f"{dataset}/{name}": value for dataset, row in table.items() for name, value in row.items()}
    ctx.log(0, {name.replace("@", "_at_"): float(value) for name, value in named.items()})


if __name__ == "__main__":
    main("recall", body, Settings)
