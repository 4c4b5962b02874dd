"""R-Search's evidence reward: can a frozen model of another family answer from the evidence alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import Field, on_last_token
from tasks.rewards.blocks import evidence_of, is_verbatim, words_of
from tasks.services import NO_SERVICES, Role, Services
from tasks.services.numbers import check_list
from tasks.types import Note, Question, Scores, Trajectory


@dataclass(frozen=True)
class EvidenceReward:
    """weight * F1 of the reader's answer to question and evidence; 0, without asking, where there is no evidence.

    Evidence is the last block that the policy wrote, if it is not blank and a search was executed: without an
    observation it is no evidence. The reader's whole reply is its answer, without the white space around it.

    R-Search Eq. 4 (arXiv 2506.04185; docs/methods/r_search.md)

    Attributes:
        weight: see above.
    """

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("reader",)
    pays_evidence: ClassVar[bool] = True
    components: ClassVar[tuple[str, ...]] = ("evidence_f1", "has_evidence", "evidence_copied", "evidence_verbatim")

    weight: float

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        """One `Scores` per trajectory; equal pairs of question and evidence are read once.

        Raises:
            ServiceError: the reader cannot answer; no trajectory gets a score then.
            ValueError: the reader does not return one text for each pair.
        """
        evidence = [evidence_of(t) for t in trajectories]
        pairs = [(question.question, block) for question, block in zip(questions, evidence, strict=True)]
        asked = list(dict.fromkeys(pair for pair in pairs if pair[1]))
        replies = services["reader"].answers(asked) if asked else []
        check_list(replies, len(asked), "services: reader", "pair")

        answers: dict[tuple[str, str], str] = dict(zip(asked, replies, strict=True))
        return [
            self._scored(trajectory, question, answers.get(pair), pair[1])
            for trajectory, question, pair in zip(trajectories, questions, pairs, strict=True)
        ]

    def _scored(self, trajectory: Trajectory, question: Question, answer: str | None, evidence: str) -> Scores:
        value = text.f1(None if answer is None else answer.strip(), question.answers)
        score = on_last_token(
            trajectory,
            self.weight * value,
            evidence_f1=value,
            has_evidence=float(bool(evidence)),
            evidence_copied=copied_share(trajectory, evidence),
            evidence_verbatim=float(is_verbatim(trajectory, evidence)),
        )
        return score if answer is None else replace(score, notes=_notes(trajectory, evidence, answer, value))


def _notes(trajectory: Trajectory, evidence: str, answer: str, value: float) -> tuple[Note, ...]:
    """The evidence and the reader's answer to it, beside the turn that wrote it."""
    turn = max(number for number, turn in enumerate(trajectory.turns) if evidence in turn.text)
    shown = f"{answer.strip()} (from: {evidence})"
    return (Note(turn, "reader's answer", value, shown),)


def copied_share(trajectory: Trajectory, evidence: str) -> float:
    """Share of the evidence's words that occur in a retrieved passage; 0 without evidence.

    It pays nothing. An evidence block that only states the answer, or copies the question, has a small one.
    """
    words = words_of(evidence)
    read = {word for turn in trajectory.turns for hit in turn.hits for word in words_of(f"{hit.title} {hit.text}")}
    return sum(word in read for word in words) / len(words) if words else 0.0


PART = EvidenceReward
