"""Stage `validate`: the Great Expectations suites over `artifacts/data`; a violation ends the pipeline here.

So does data without questions of the splits that are evaluated, before hours go into training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.expectations import check
from tasks.data.ingest import CORPUS, QUESTIONS
from tasks.data.splits import counted, described, require_evaluated
from tasks.runner import Context, main
from tasks.store import read_jsonl, write_json

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
OUT = Path("artifacts/validation.json")
DOCS = Path(".scratch/data_docs")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        data: name of the file of `conf/data/`.
        validated: the split that is played during training.
        evaluated: the splits of which the first that a dataset has is played for the result table.
    """

    data: str
    validated: str
    evaluated: tuple[str, ...]


def settings(run: RunSettings) -> Settings:
    """Which split is used for what."""
    return Settings(run.params.data, run.data.validation_split, run.data.evaluate_splits)


def body(ctx: Context[Settings]) -> None:
    """Check `artifacts/data/` and write `artifacts/validation.json`."""
    corpus, docs = ctx.root / DATA / CORPUS, ctx.root / DOCS
    outcome = {
        "passages": check("passages", [corpus], docs),
        "questions": check("questions", [ctx.root / DATA / QUESTIONS], docs, corpus=corpus),
    }
    _check_splits(ctx.settings, ctx.root / DATA / QUESTIONS)
    write_json(ctx.root / OUT, outcome)
    for kind, result in outcome.items():
        print(f"{kind}: {result['rows']} rows, {len(result['expectations'])} expectations hold", flush=True)
    ctx.track_data("validation", outcome["questions"]["rows"])
    ctx.log(0, {f"{kind}_rows": float(result["rows"]) for kind, result in outcome.items()})


def _check_splits(settings: Settings, path: Path) -> None:
    """Raise the ValueError where nothing can be evaluated; say so where nothing is validated."""
    counts = counted(row["split"] for _, row in read_jsonl(path))
    require_evaluated(counts, settings.evaluated, settings.data)
    if not counts[settings.validated]:
        print(
            f"warning: conf/data/{settings.data}.yaml: validation_split={settings.validated}: artifacts/data has no "
            f"question of it, but {described(counts)}. Nothing is validated during training, and `select: best` keeps "
            "the last policy.",
            flush=True,
        )


if __name__ == "__main__":
    main("validate", body, Settings)
