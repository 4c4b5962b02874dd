"""Labels of played trajectories: each play gets its own, and what cannot be labelled is left out and counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tasks.records.played import PlayedRow, PlayedTurn
from tasks.reward_model.labelling import Counts, label
from tasks.services import StepLabels
from tasks.types import Hop, Question, Status, Turn

HOPS = (Hop("Who rules Avenor ?", "Bristow", None, ("Avenor ruler",)),)


@dataclass
class Told:
    """Gives these labels in order; it reads all plays before the first, as a labeller does that asks ahead."""

    labels: Sequence[StepLabels]
    asked: list[str] = field(default_factory=list)

    def label(self, played: Iterable[tuple[Question, Sequence[Turn]]]) -> Iterator[StepLabels]:
        self.asked = [question.id for question, _ in played]
        yield from self.labels


def played(number: int, searches: int, status: Status = "answered", is_right: bool = False) -> PlayedRow:
    """A play that searches so often, and then answers."""
    kinds = [True] * searches + [False]
    return PlayedRow(
        question_id=f"q{number}", question="Who ?", answers=["Bristow"], copy=0, part="train", status=status,
        answer="x", is_right=is_right,
        turns=[
            PlayedTurn(kind="search" if executed else "answer", content="x", queries=[], text="", observation="",
                       executed=executed)
            for executed in kinds
        ],
    )  # fmt: skip


def test_each_play_keeps_its_own_labels_and_what_has_none_is_left_out() -> None:
    rows = [
        played(0, 2, "failed"),
        played(1, 2, is_right=True),
        played(2, 1, is_right=True),
        played(3, 1),
        played(4, 0),
        played(5, 1),
    ]
    labeller = Told([
        StepLabels((True, False)),
        StepLabels(None, "not_json: found x"),
        StepLabels((True, True)),  # Two labels of one search.
        StepLabels(()),
        StepLabels((False,)),
    ])  # fmt: skip
    counts = Counts()
    found = list(label(rows, {row.question_id: HOPS for row in rows}, labeller, counts))
    assert labeller.asked == ["q1", "q2", "q3", "q4", "q5"]
    assert [(row.question_id, row.labels) for row in found] == [("q1", ["+", "-"]), ("q4", []), ("q5", ["-"])]
    assert counts.plain == {
        "read": 6, "kept": 3, "right": 1, "searches": 3, "pivots": 1,
        "dropped": {"labels_differ": 1, "not_json": 1, "search_failed": 1},
    }  # fmt: skip
