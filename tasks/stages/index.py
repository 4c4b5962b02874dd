"""Stage `index`: builds the search index of `artifacts/data/corpus.jsonl` with the retriever of `params.yaml`."""

from pathlib import Path

from tasks import retrieval
from tasks.runner import Context, run

CORPUS = Path("artifacts/data/corpus.jsonl")
OUT = Path("artifacts/index")


def body(ctx: Context) -> None:
    """Write `artifacts/index/`."""
    settings = retrieval.load_settings(ctx.params.retriever, ctx.root)
    ctx.track.log_params(settings)
    if not (ctx.root / CORPUS).is_file():
        raise ValueError(f"{CORPUS}: the stage needs this and it is missing. Run `make run`, which makes it.")
    scratch = ctx.root / retrieval.SCRATCH
    manifest = retrieval.build(ctx.root / CORPUS, ctx.root / OUT, settings, scratch, ctx.progress)
    ctx.track_data("index", manifest["num_passages"])
    ctx.log(0, {"num_passages": manifest["num_passages"]})


if __name__ == "__main__":
    run("index", body)
