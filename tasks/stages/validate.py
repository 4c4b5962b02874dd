"""Stage `validate`: the Great Expectations suites over `artifacts/data`; a violation ends the pipeline here."""

from __future__ import annotations

from pathlib import Path

from tasks.data.expectations import check
from tasks.data.ingest import CORPUS, QUESTIONS
from tasks.runner import Context, run
from tasks.store import write_json

DATA = Path("artifacts/data")
OUT = Path("artifacts/validation.json")
DOCS = Path(".scratch/data_docs")


def main() -> None:
    """Entry point."""
    run("validate", _body)


def _body(ctx: Context) -> None:
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
    main()
