"""`python -m tasks.score`: what a method's rewards give to recorded trajectories; `make score` is the short way.

Each trajectory of the file is printed with what every reward gave to it, where and why; a table of all stands at the
end. Exit status: 0, or 1 after an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import own, program, store
from tasks.tool.script import one_line

if TYPE_CHECKING:
    from tasks.plan import RunSettings
    from tasks.rl.method import Method
    from tasks.score.read import Played
    from tasks.services import Services
    from tasks.types import Question

DATA, TRAIN = Path("artifacts/data"), Path("artifacts/train")
SCRATCH = Path(".scratch/score")
SHOWN = 5
_INTERRUPTED = 130  # As shells report SIGINT.


def main(words: list[str] | None = None, root: Path = Path(".")) -> int:
    """Score the file of the command line; returns the exit status."""
    given = _parser().parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _score(given, root)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (ValueError, store.OutageError) as error:
        print(one_line(error), file=sys.stderr, flush=True)
        return 1
    return 0


def _score(given: argparse.Namespace, root: Path) -> None:
    from tasks import conf, methods, params
    from tasks.plan import RunSettings
    from tasks.score import refused, score, show
    from tasks.score.read import read

    if (named := os.environ.get(own.VARIABLE)) is not None:
        own.check(named, root)
    run = RunSettings(root, params.read(root))
    conf.kind_of(("method",), given.method, root, "METHOD=")
    method = methods.build(run.method(given.method), None)
    if (reason := refused(method.rewards, method)) is not None:
        raise ValueError(reason)

    path = given.file or newest(root, given.method)
    if not path.is_file():
        raise ValueError(f"FILE={path}: there is no such file. Without FILE the newest training of the method is read.")
    rows = read(path, method.grammar, _questions(root))
    played = _joined([one for one in rows if one.trajectory.status != "failed"], method, run)
    with _services(method, given, run) as services:
        scored = score(method, played, services)

    num_failed = len(rows) - len(played)  # Training takes none of them: an outage must not teach anything.
    if given.json:
        for one in scored:
            print(json.dumps(show.trajectory_tree(one), ensure_ascii=False))
        print(json.dumps({"summary": show.summary_tree(scored, num_failed)}))
        return

    print(f"{path}: rewards of {given.method}\n")
    has_colours = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    for one in scored[: given.show]:
        print("\n".join(show.trajectory_lines(one, has_colours)))
    if len(scored) > given.show:
        print(f"... and {len(scored) - given.show} more: ARGS='--show {len(scored)}' shows all.\n")
    print("\n".join(show.summary_lines(method, scored, num_failed)))


def newest(root: Path, method: str) -> Path:
    """The trajectories that were recorded last in training: of this method, else of any.

    Raises:
        ValueError: there are none.
    """
    for pattern in (f"{method}-*/trajectories.jsonl", "*/trajectories.jsonl"):
        files = [path for path in (root / TRAIN).glob(pattern) if path.stat().st_size]
        if files:
            return max(files, key=lambda path: path.stat().st_mtime_ns)
    raise ValueError(
        f"{TRAIN}: no run has recorded trajectories yet. Run `make smoke METHODS=search_r1_grpo SEEDS=0`, or name a "
        "file with FILE=."
    )


def _questions(root: Path) -> dict[str, Question]:
    """The questions of this clone's data by id; none before the first run."""
    from tasks.data.records import read_questions

    path = root / DATA / "questions.jsonl"
    return {question.id: question for question in read_questions(path)} if path.is_file() else {}


def _joined(played: list[Played], method: Method, run: RunSettings) -> list[Played]:
    """These trajectories, their questions with what the rewards read, as stage `inputs` joins it.

    What a row says itself goes before what the data says. A line of standard error says what is missing.
    """
    from tasks.inputs import join

    needed = {one.question.id: one.question for one in played}
    ready = [join.HOPS, join.CORPUS]
    joined = needed
    if method.reads and all((run.root / path).is_file() for path in ready):
        training = join.join(list(needed.values()), method.reads, run.data.validation_split, run.root).training
        joined = {question.id: question for question in training}
    found = [_with_own(one, joined[one.question.id]) for one in played]
    turns = [turn for one in found for turn in one.trajectory.turns if turn.executed and not turn.hits]
    if turns:
        what = "1 search has" if len(turns) == 1 else f"{len(turns)} searches have"
        print(f"{what} no passages, so rewards that read passages give nothing for that", file=sys.stderr)
    for name, lacks in join.LACKS.items():
        count = sum(lacks(one.question) for one in found) if name in method.reads else 0
        if count:
            print(f"{count} of {len(found)} trajectories have no {name}: these earn nothing for it", file=sys.stderr)
    return found


def _with_own(played: Played, joined: Question) -> Played:
    from dataclasses import replace

    own_fields = {
        name: value for name in ("decomposition", "gold_passages") if (value := getattr(played.question, name))
    }
    return replace(played, question=replace(joined, answers=played.question.answers, **own_fields))


@contextlib.contextmanager
def _services(method: Method, given: argparse.Namespace, run: RunSettings) -> Iterator[Services]:
    """The services that the rewards call, opened as in training."""
    from tasks import trained
    from tasks.services import NO_SERVICES, Resources, opened

    roles = {role for reward in method.rewards for role in reward.services}
    if not roles:
        yield NO_SERVICES
        return
    try:
        models = trained.find(run.root, run.models(given.method), given.seed)
    except store.DataError as error:
        raise ValueError(f"{error} Its models are trained by `make run METHODS={given.method}`.") from None
    called = {role: kind for role, kind in method.services.items() if role in roles}
    SCRATCH.mkdir(parents=True, exist_ok=True)
    resources = Resources(run.root, run.root / SCRATCH, None, None, run.training().max_batch_tokens, models)
    with opened(called, resources) as services:
        yield services


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.score", description="What a method's rewards give to recorded trajectories."
    )
    parser.add_argument("--method", required=True, help="file of conf/method, in the clone or in PARTS")
    parser.add_argument("--file", type=Path, help="recorded trajectories; without it, those of the newest training")
    parser.add_argument("--show", type=int, default=SHOWN, metavar="N", help=f"trajectories that are printed ({SHOWN})")
    parser.add_argument("--seed", type=int, default=0, help="of the models that its services load (0)")
    parser.add_argument("--json", action="store_true", help="a JSON object a trajectory, and one with the table")
    return parser


if __name__ == "__main__":
    program.run(main)
