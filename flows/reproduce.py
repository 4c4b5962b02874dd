"""The command line of the pipeline: `python -m flows.reproduce`.

Its libraries take seconds to load. They are loaded inside `main`, so that Ctrl-C is an ordinary stop from the start.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows import STOPPED

if TYPE_CHECKING:
    from flows.pipeline import Run


def main(words: list[str] | None = None) -> int:
    """The command line; 0 when every stage is up to date afterwards."""
    try:
        return _run(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr, flush=True)
        return 130


def _run(words: list[str] | None) -> int:
    from flows import settings

    root = Path.cwd()
    given = _parser(settings.help_text(root)).parse_args(words)
    answers = settings.parse(given.set, root)
    if given.compare:
        answers = {**settings.compare_answers(given.compare, root), **answers}

    from flows.ending import close
    from flows.pipeline import prepared

    with prepared(root, answers, tuple(given.force), max(1, given.max_parallel), given.once) as run:
        run_here(run, not given.no_prefect)
        return close(run)


def run_here(run: Run, use_prefect: bool) -> None:
    """Run through Prefect if it works, else directly; both fill `run.outcomes`."""
    from flows.ending import stopped_by_signals
    from flows.server import find_server

    server = find_server(run.root) if use_prefect else None
    # Where nothing has to run, Prefect would cost more than the rest: loading it takes 2 s, a temporary server many.
    if use_prefect and (server is not None or run.graph.stale):
        if server is None:
            run.say("starting Prefect, which records this run ...")
        from flows import flow, settings

        flow.follow(run, settings.Form(), server)

    if len(run.outcomes) < len(run.graph.needs) and not run.stopper.is_stopped:
        with stopped_by_signals(run):
            run.run()


def _parser(epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.reproduce",
        description="Run every stage that is out of date, in the order DVC gives, from a question to a result table.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="write into params.yaml, run")
    parser.add_argument("--once", action="store_true", help="put params.yaml back at the end")
    parser.add_argument("--compare", metavar="NAME", help="methods and seeds of conf/compare/NAME.yaml")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="run it even if unchanged")
    parser.add_argument("--max-parallel", type=int, default=2, help="independent stages at once (2)")
    parser.add_argument("--no-prefect", action="store_true", help="run the stages without Prefect")
    return parser


if __name__ == "__main__":
    sys.exit(main())
