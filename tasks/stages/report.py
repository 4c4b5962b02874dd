"""Stage `report`: reads every evaluated policy, writes `reports/` (page, CSV, Markdown) and prints the short table.

`--table` only prints the table of the artifacts that are there and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks import conf, runner
from tasks.report import page, printed, study, table
from tasks.runner import tracking

ARTIFACTS, REPORTS = Path("artifacts"), Path("reports")
HEADLINE = ("em", "em_minus_base", "searches")  # By which pipeline runs are compared in MLflow.
WHOLE = (table.ALL, table.ALL, table.ALL, "greedy")  # All seeds, datasets and hops.


def titles(params: conf.Params, root: Path = Path()) -> dict[str, str]:
    """Method -> display name: key `title` of its file in `conf/method/`, else its plain name."""
    return {name: str(conf.section("method", name, root).get("title", name)) for name in params.methods}


def results(params: conf.Params, root: Path = Path()) -> table.Results:
    """The result table of the runs that `params.yaml` names."""
    names, num_resamples = titles(params, root), params.evaluate.num_bootstrap
    found = table.build(root / ARTIFACTS, params.methods, params.seeds, num_resamples, names)
    return study.complete(found, root / ARTIFACTS, num_resamples, printed.read(root / conf.CONF / printed.FILE))


def write(params: conf.Params, root: Path = Path()) -> table.Results:
    """Write the three files of `reports/`; returns what they show."""
    found = results(params, root)
    ledger = table.read_ledger(root / runner.SCRATCH / "ledger")
    facts = {"data": params.data, "model": params.model, "retriever": params.retriever, "scale": params.scale}
    table.write_csv(root / REPORTS / "results.csv", found.cells)
    table.write_markdown(root / REPORTS / "results.md", found)
    page.write_page(root / REPORTS / "index.html", found, root / ARTIFACTS, ledger, facts, _dvc_groups(root))
    return found


def guard(params: conf.Params, root: Path = Path()) -> None:
    """The Great Expectations suites over what was played; nothing is published that breaks one.

    Raises:
        DataError: one line for each violation; Data Docs are in `.scratch/data_docs/`.
    """
    from tasks.data.expectations import check

    docs, artifacts = root / runner.SCRATCH / "data_docs", root / ARTIFACTS
    names = {policy: [f"{policy}-{seed}" for seed in params.seeds] for policy in (table.BASE, *params.methods)}
    played = [artifacts / "evaluate" / name for policy in names for name in names[policy]]
    trained = [artifacts / "train" / name / "trajectories.jsonl" for policy in params.methods for name in names[policy]]
    recorded = [path for path in trained if path.stat().st_size]  # Empty where none is to be recorded.
    check("results", [folder / "scores.jsonl" for folder in played], docs)
    check("trajectories", [*(folder / "trajectories.jsonl" for folder in played), *recorded], docs)


def _dvc_groups(root: Path) -> list[str]:
    path = root / "dvc.yaml"
    return list(conf.read_yaml(path).get("stages", {})) if path.is_file() else []


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
    headline = [c for c in found.cells if c.metric in HEADLINE and (c.seed, c.dataset, c.hops, c.mode) == WHOLE]
    context.track.log_results({f"{c.policy}/{c.metric}": c.value for c in headline})
    context.track.log_table("results.md", (context.root / REPORTS / "results.md").read_text(encoding="utf-8"))
    context.track.log_artifact(REPORTS)


if __name__ == "__main__":
    main()
