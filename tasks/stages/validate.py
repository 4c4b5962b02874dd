"""Stage `validate`: the Great Expectations suites over `artifacts/data`; a violation ends the pipeline here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.expectations import check
from tasks.data.ingest import CORPUS, QUESTIONS
from tasks.runner import Context, main
from tasks.store import write_json

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
OUT = Path("artifacts/validation.json")
DOCS = Path(".scratch/data_docs")


@dataclass(frozen=True)
class Settings:
    """The stage reads none of the settings."""


def settings(run: RunSettings) -> Settings:
    """None."""
    return Settings()


def body(ctx: Context[Settings]) -> None:
    """Check `artifacts/data/` and write `artifacts/validation.json`."""
    corpus, docs = ctx.root / DATA / CORPUS, ctx.root / DOCS
    outcome = {
        "passages": check("passages", [corpus], docs),
        "questions": check("questions", [ctx.root / DATA / QUESTIONS], docs, corpus=corpus),
    }
    write_json(ctx.root / OUT, outcome)
    for kind, result in outcome.items():
        print(f"{kind}: {result['rows']} rows, {len(result['expectations'])} expectations hold", flush=True)
    ctx.track_data("validation", outcome["questions"]["rows"])
    ctx.log(0, {f"{kind}_rows": float(result["rows"]) for kind, result in outcome.items()})


if __name__ == "__main__":
    main("validate", body, Settings)
