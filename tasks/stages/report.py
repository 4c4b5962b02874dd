"""Stage `report`: reads every evaluated system, writes `reports/` (page, CSV, Markdown) and prints the short table.

`--table` only prints the table of the artifacts that are there and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks import conf, runner
from tasks.records import systems
from tasks.report import page, printed, study, table
from tasks.runner import tracking

ARTIFACTS, REPORTS = Path("artifacts"), Path("reports")
WHOLE = (table.ALL, table.ALL, table.ALL, "greedy")  # All seeds, datasets and hops.


def titles(params: conf.Params, root: Path = Path()) -> dict[str, str]:
    """System -> display name: key `title` of its file, else its plain name."""
    files = {name: conf.section(conf.kind_of(conf.SYSTEMS, name, root), name, root) for name in params.systems}
    return {name: str(file.get("title", name)) for name, file in files.items()}


def results(params: conf.Params, root: Path = Path()) -> table.Results:
    """The result table of the runs that `params.yaml` names."""
    evaluate, artifacts = params.evaluate, root / ARTIFACTS
    found = table.build(
        artifacts, params.systems, params.seeds, evaluate.reference, evaluate.num_bootstrap, titles(params, root)
    )
    return study.complete(found, artifacts, evaluate.num_bootstrap, printed.read(root / conf.CONF / printed.FILE))


def write(params: conf.Params, root: Path = Path()) -> table.Results:
    """Write the three files of `reports/`; returns what they show."""
    found = results(params, root)
    ledger = table.read_ledger(root / runner.SCRATCH / "ledger")
    facts = {"data": params.data, "model": params.model, "retriever": params.retriever, "scale": params.scale}
    table.write_csv(root / REPORTS / "results.csv", found.cells)
    table.write_markdown(root / REPORTS / "results.md", found)
    page.write_page(root / REPORTS / "index.html", found, root / ARTIFACTS, ledger, facts)
    return found


def guard(params: conf.Params, root: Path = Path()) -> None:
    """The Great Expectations suites over what was played; nothing is published that breaks one.

    Raises:
        DataError: one line for each violation; Data Docs are in `.scratch/data_docs/`.
    """
    from tasks.data.expectations import check

    docs, artifacts = root / runner.SCRATCH / "data_docs", root / ARTIFACTS
    names = [f"{system}-{seed}" for system in params.systems for seed in params.seeds]
    played = [artifacts / "evaluate" / name for name in names]
    check("results", [folder / "scores.jsonl" for folder in played], docs)

    trained = [folder for name in names if systems.read(folder := artifacts / "train" / name).is_trained]
    recorded = [path for folder in trained if (path := folder / "trajectories.jsonl").stat().st_size]  # May be empty.
    check("trajectories", [*(folder / "trajectories.jsonl" for folder in played), *recorded], docs)


def main() -> None:
    """Run the stage, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the result table and write nothing")
    if parser.parse_args().table:
        root = Path()
        print(table.terminal(results(conf.params(root), root), table.read_ledger(root / runner.SCRATCH / "ledger")))
        return
    runner.run("report", _body)


def _body(context: runner.Context) -> None:
    guard(context.params, context.root)
    tracking.wait_for_ids(context.root)
    found = write(context.params, context.root)
    print(table.terminal(found, table.read_ledger(context.root / runner.SCRATCH / "ledger")))
    metrics = ("em", table.minus("em", found.reference), "searches")  # By which MLflow compares pipeline runs.
    headline = [c for c in found.cells if c.metric in metrics and (c.seed, c.dataset, c.hops, c.mode) == WHOLE]
    context.track.log_results({f"{c.policy}/{c.metric}": c.value for c in headline})
    context.track.log_table("results.md", (context.root / REPORTS / "results.md").read_text(encoding="utf-8"))
    context.track.log_artifact(REPORTS)


if __name__ == "__main__":
    main()
