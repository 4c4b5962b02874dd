"""Stage `report`: reads every evaluated system and writes `reports/`; where no run started it, it prints the table.

The page shows machine facts. All other files are functions of the artifacts, and DVC's outputs.

`--table` only prints the table of the artifacts that are there and writes nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import planned
from tasks.records import systems
from tasks.report import compared, page, printed, reward_models, start_policy, study, table, terminal, tool, training
from tasks.runner import Context, ledger, main

if TYPE_CHECKING:
    from tasks.plan import RunSettings

ARTIFACTS, REPORTS = Path("artifacts"), Path("reports")
FILES = ("results.csv", "results.md", "metrics", "curves.csv", "index.html")
PAPERS = Path("conf/papers/printed.csv")
DOCS = Path(".scratch/data_docs")
SMOKE = "smoke"
WHOLE = (table.ALL, table.ALL, table.ALL, "greedy")  # All seeds, datasets and hops.


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        titles: system -> display name, in the order of `systems`.
        seeds: of each system.
        reference: the system that others are compared with.
        num_bootstrap: resamples behind each interval.
        facts: names of data, model, retriever and scale, for the page.
        validation_split: the split whose questions are played during training.
        reward_models: reward model that this run trains -> the systems that learn from it.
        tools: systems whose evidence another model reads.
        notes: what a reader must know before any number, a sentence each.
    """

    titles: dict[str, str]
    seeds: tuple[int, ...]
    reference: str
    num_bootstrap: int
    facts: dict[str, str]
    validation_split: str
    reward_models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def settings(run: RunSettings) -> Settings:
    """Which systems and seeds the report shows, and under which names."""
    params = run.params
    facts = {"data": params.data, "model": params.model, "retriever": params.retriever, "scale": params.scale}
    evaluate, split = params.evaluate, run.data.validation_split
    users = {name: tuple(run.users_of_models[name]) for name in params.reward_models}
    return Settings(
        titles=run.titles,
        seeds=params.seeds,
        reference=evaluate.reference,
        num_bootstrap=evaluate.num_bootstrap,
        facts=facts,
        validation_split=split,
        reward_models=users,
        tools=params.tools,
        notes=tuple(_notes(run)),
    )


def _notes(run: RunSettings) -> Iterator[str]:
    """What makes the numbers of a run mean less than they seem to."""
    if run.params.scale == SMOKE:
        yield "Smoke scale: nothing is learned here; it only shows that the pipeline runs."
    asked, trained = run.params.evaluate.top_k, run.rollout().top_k
    if asked not in (0, trained):
        yield f"Evaluated with {asked} passages per search; the scale trains with {trained}, unless a method says else."


def results(settings: Settings, root: Path = Path()) -> table.Results:
    """The result table of these systems and seeds."""
    names, artifacts = list(settings.titles), root / ARTIFACTS
    found = table.build(artifacts, names, settings.seeds, settings.reference, settings.num_bootstrap, settings.titles)
    words = start_policy.notes(artifacts, settings.seeds, found.manifest)
    found = replace(found, validation_split=settings.validation_split, notes=(*settings.notes, *found.notes, *words))
    tools = tool.read(artifacts, settings.tools, settings.seeds, settings.num_bootstrap)
    found = study.complete(found, artifacts, settings.num_bootstrap, printed.read(root / PAPERS), tools)
    models = reward_models.read(artifacts, list(settings.reward_models), settings.seeds)
    taught = start_policy.sections(artifacts, settings.seeds)
    return replace(
        found, sections=(*found.sections, *taught, *reward_models.sections(found, models, settings.reward_models))
    )


def write(settings: Settings, root: Path = Path()) -> table.Results:
    """Write the files of `reports/`; returns what they show.

    Old ones go first, so that files of two runs never stand side by side, wherever this breaks off.
    """
    files = [root / REPORTS / name for name in FILES]
    for path in files:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    found = results(settings, root)
    table.write_csv(files[0], found.cells)
    table.write_markdown(files[1], found)
    compared.write_metrics(files[2], found)
    compared.write_curves(files[3], training.read_trainings(found.runs, root / ARTIFACTS))
    made = {stage: tuple(settings.reward_models) for stage in ("trajectories", "labels", "reward_quality")}
    made["tool"] = settings.tools
    page.write_page(files[4], found, root / ARTIFACTS, ledger.read(root), settings.facts, made=made)
    return found


def guard(settings: Settings, root: Path = Path()) -> None:
    """The Great Expectations suites over what was played; nothing is published that breaks one.

    Raises:
        DataError: one line for each violation; Data Docs are in `.scratch/data_docs/`.
    """
    from tasks.data.expectations import check

    docs, artifacts = root / DOCS, root / ARTIFACTS
    names = [f"{system}-{seed}" for system in settings.titles for seed in settings.seeds]
    played = [artifacts / "evaluate" / name for name in names]
    check("results", [folder / "scores.jsonl" for folder in played], docs)

    trained = [folder for name in names if systems.read(folder := artifacts / "train" / name).is_trained]
    recorded = [path for folder in trained if (path := folder / "trajectories.jsonl").stat().st_size]  # May be empty.
    check("trajectories", [*(folder / "trajectories.jsonl" for folder in played), *recorded], docs)


def body(ctx: Context[Settings]) -> None:
    """Check what was played, then write `reports/`."""
    guard(ctx.settings, ctx.root)
    found = write(ctx.settings, ctx.root)
    if "BREADCRUMB_RUN" not in os.environ:  # A run prints the table at its own end, as wide as its terminal.
        print(terminal.headline(ctx.root))
    ctx.track.log_metrics(0, _compared_by(found), shared=True)
    ctx.track.log_artifact(REPORTS / "results.md", shared=True)
    ctx.track.log_artifact(REPORTS)


def _compared_by(found: table.Results) -> dict[str, float]:
    """The numbers by which MLflow compares pipeline runs, with their intervals.

    Runs of different systems share no name but that of the reference, so the best of the others is `best`, too.
    """
    metrics = ("em", table.minus("em", found.reference), "searches")
    cells = [c for c in found.cells if c.metric in metrics and (c.seed, c.dataset, c.hops, c.mode) == WHOLE]
    ems = {c.policy: c.value for c in cells if c.metric == "em" and c.policy != found.reference}
    if ems:
        best = max(ems, key=lambda policy: ems[policy])
        cells = [*(replace(c, policy="best") for c in cells if c.policy == best), *cells]
    ends = {"": "value", "_low": "low", "_high": "high"}
    numbers = {f"{c.policy}/{c.metric}{end}": getattr(c, key) for c in cells for end, key in ends.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def show(root: Path = Path()) -> None:
    """Print the result table of the artifacts that are there."""
    chosen = planned.settings_of(planned.read(root, "report"), Settings, "report")
    print(terminal.fitted(table.markdown(results(chosen, root))))


if __name__ == "__main__":
    show() if "--table" in sys.argv[1:] else main("report", body, Settings)
