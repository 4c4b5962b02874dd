"""Stage `recall`: measures the index on the questions whose gold passages are known."""

from pathlib import Path

from tasks import store
from tasks.data.records import read_questions
from tasks.retrieval import open_retriever
from tasks.retrieval.recall import recall_table
from tasks.runner import Context, run

DATA = Path("artifacts/data")
INDEX = Path("artifacts/index")
OUT = Path("artifacts/recall.json")


def body(ctx: Context) -> None:
    """Write `artifacts/recall.json`: `{"datasets": {name: {num_questions, recall@k, all_gold@10, answer@k}}}`."""
    retriever = open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    table = recall_table(read_questions(ctx.root / DATA / "questions.jsonl"), retriever, progress=ctx.progress)
    store.write_json(ctx.root / OUT, {"datasets": table})
    ctx.track_data("recall", sum(int(row["num_questions"]) for row in table.values()))
    # MLflow refuses "@" in the name of a metric.
    named = {f"{dataset}/{name}": value for dataset, row in table.items() for name, value in row.items()}
    ctx.log(0, {name.replace("@", "_at_"): float(value) for name, value in named.items()})


if __name__ == "__main__":
    run("recall", body)
