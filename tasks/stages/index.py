"""Stage `index`: builds the search index of `artifacts/data/corpus.jsonl` with the retriever of `params.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import retrieval
from tasks.runner import Context, main

if TYPE_CHECKING:
    from tasks.plan import RunSettings

CORPUS = Path("artifacts/data/corpus.jsonl")
OUT = Path("artifacts/index")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        retriever: backend and its settings, see `tasks.retrieval.settings_of`.
    """

    retriever: dict[str, Any]


def settings(run: RunSettings) -> Settings:
    """The retriever of this run."""
    return Settings(run.retriever())


def loads(settings: Settings) -> Any:
    """The settings of the backend, which lie in its module."""
    return retrieval.settings_of(settings.retriever, "retriever")


def body(ctx: Context[Settings]) -> None:
    """Write `artifacts/index/`."""
    retriever = loads(ctx.settings)
    ctx.track.log_params(retriever)
    if not (ctx.root / CORPUS).is_file():
        raise ValueError(f"{CORPUS}: the stage needs this and it is missing. Run `make run`, which makes it.")
    scratch = ctx.root / retrieval.SCRATCH
    manifest = retrieval.build(ctx.root / CORPUS, ctx.root / OUT, retriever, scratch, ctx.progress)
    ctx.track_data("index", manifest["num_passages"])
    ctx.log(0, {"num_passages": manifest["num_passages"]})


if __name__ == "__main__":
    main("index", body, Settings)
