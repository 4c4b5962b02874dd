"""The command line of the pipeline: `python -m flows.reproduce`.

Its libraries take seconds to load. They are loaded inside `main`, so that Ctrl-C and SIGTERM are an ordinary stop from
the start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows import STOPPED, command

if TYPE_CHECKING:
    from flows.pipeline import Run


def main(words: list[str] | None = None) -> int:
    """The command line; 0 when every stage is up to date afterwards."""
    return command(lambda: _run(words), STOPPED)


def _run(words: list[str] | None) -> int:
    from tasks.params import edit, places

    root = Path.cwd()
    given = _parser(edit.help_text(root)).parse_args(words)
    answers = edit.parse(given.set, root)
    if not given.name.isprintable():
        raise ValueError(f"--name: found {given.name!r}, expected one line of printable text.")
    if given.compare:
        answers = {**edit.compare_answers(given.compare, root), **answers}
    places.check_preset(given.set, answers, root)

    print("reading settings and stages ...", flush=True)
    from flows.child import stopped_by_signals
    from flows.pipeline import prepared

    how = {"force": tuple(given.force), "max_parallel": max(1, given.max_parallel)}
    with prepared(root, answers, given.keep, given.name, **how) as run:
        # Where nothing has to run, Prefect would cost more than the rest.
        has_ended = not run.graph.stale or given.no_prefect or _follow(run)
        with stopped_by_signals(run.stopper):
            run.run()  # What Prefect has left.
        code = run.close()
    if not has_ended:
        sys.stdout.flush()
        os._exit(code)  # Python would wait for Prefect.
    return code


def _follow(run: Run) -> bool:
    """Run through Prefect, on a server of this run's own where there is no other; whether Prefect has ended."""
    from flows.server import find_server, started

    with contextlib.ExitStack() as stack:
        server = find_server(run.root)
        if server is None:
            run.say("starting Prefect, which records this run ...")
            try:
                server, _ = stack.enter_context(started(run.root))
            except ValueError as error:
                print(f"warning: {error}; going on without it.", file=sys.stderr, flush=True)
                return True
        from flows.child import stopped_by_signals
        from flows.flow import follow

        with stopped_by_signals(run.stopper):
            return follow(run, server)


def _parser(epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.reproduce",
        description="Run every stage that is out of date, in the order DVC gives, from a question to a result table.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of this run")
    parser.add_argument("--keep", action="store_true", help="write the settings into params.yaml for good")
    parser.add_argument("--compare", metavar="NAME", help="methods and seeds of conf/compare/NAME.yaml")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="run it even if unchanged")
    parser.add_argument("--max-parallel", type=int, default=2, help="independent stages at once (2)")
    parser.add_argument("--name", default="", help="a name for this run; empty takes its systems, scale and seeds")
    parser.add_argument("--no-prefect", action="store_true", help="run the stages without Prefect")
    return parser


if __name__ == "__main__":
    sys.exit(main())
