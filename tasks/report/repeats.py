"""How often the start policy repeats a query, because StepSearch's penalty punishes each repeat before it teaches.

An exact repeat returns documents that were seen before and nothing else, so StepSearch's penalty takes P = 1 for it, as
much as a right answer earns. Where the start policy repeats a query in most of its right answers, a policy gains more
under that penalty by stopping than by searching well, so a comparison with it measures the start policy.
StepSearch Eq. 13 (arXiv 2505.15107; docs/methods/stepsearch.md)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import text
from tasks.records import schema
from tasks.records.trajectories import TrajectoryRow
from tasks.report.artifacts import Run
from tasks.report.table import Results
from tasks.store import Row

MOST = 0.5
"""Above this share of the right answers, the penalty falls on most of them."""


@dataclass(frozen=True)
class Repeats:
    """Different recorded answers of the start policies after two searches or more, and those that ask a query twice.

    Attributes:
        right, wrong: numbers of answers that differ in seed, question, queries or words.
        right_repeated, wrong_repeated: those in which a query stands word for word a second time.
    """

    right: int
    right_repeated: int
    wrong: int
    wrong_repeated: int

    @property
    def is_habit(self) -> bool:
        """Whether most right answers contain a repeat."""
        return self.right_repeated > MOST * self.right

    def __str__(self) -> str:
        """What was counted, in words."""
        return (
            f"{self.right_repeated} of {self.right} different right answers with two or more searches repeat a query "
            f"word for word, and {self.wrong_repeated} of {self.wrong} wrong ones"
        )


def punishes(runs: Iterable[Run]) -> bool:
    """Whether a reward of these runs has a `penalty`, which it takes for documents that were seen before."""
    return any(reward.get("penalty") for run in runs for reward in _rewards(run))


def _rewards(run: Run) -> Sequence[Row]:
    settings = (run.training or {}).get("settings", {})
    rewards: Sequence[Row] = settings.get("method", {}).get("rewards", [])
    return rewards


def count(results: Results, artifacts: Path) -> Repeats:
    """Count the recorded answers of the start policies, each once.

    They are the evaluations of systems that play the start policy as it is, and the rollouts of training's first step.
    Methods that train the same start policy draw many of the same first rollouts, so one answer stands in several
    files: counted there it would weigh as often as there are methods.

    Raises:
        DataError: a malformed row.
    """
    answers: dict[tuple[int, str, tuple[str, ...], str | None], bool] = {}
    for row in _played_by_start(results.runs, artifacts):
        queries = tuple(turn.content.strip() for turn in row.turns if turn.kind == "search" and turn.executed)
        if len(queries) > 1:
            answers[row.seed, row.question_id, queries, row.answer] = text.exact_match(row.answer, row.answers) == 1

    repeated: dict[bool, list[bool]] = {True: [], False: []}
    for (_, _, queries, _), is_right in answers.items():
        repeated[is_right].append(len(set(queries)) < len(queries))
    return Repeats(len(repeated[True]), sum(repeated[True]), len(repeated[False]), sum(repeated[False]))


def _played_by_start(runs: Sequence[Run], artifacts: Path) -> Iterator[TrajectoryRow]:
    for run in runs:
        kind = "evaluate" if run.training is None else "train"
        path = artifacts / kind / f"{run.policy}-{run.seed}" / "trajectories.jsonl"
        if not path.is_file() or (run.training is None and not run.made_by.startswith("base@")):
            continue
        rows = (row for _, row in schema.read(TrajectoryRow, path))
        yield from (row for row in rows if run.training is None or row.step == 1)
