"""Reads recorded trajectories: the rows that stages write, and shorter ones that a person writes.

The one field that a row must have is `question`. Beside it stand `answers` (or a `question_id` of this run's data) and
`turns`, each with the `text` that was written, or `answer` alone. The fields are those of `tasks.records.trajectories`
and `tasks.records.played`; those that say what earlier rewards gave are read over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.records import schema
from tasks.records.schema import Count, Number, row
from tasks.store import DataError, read_jsonl
from tasks.types import Action, ActionKind, Flag, Hit, Hop, Hops, Passage, Question, Status, Text, Trajectory, Turn

_WORD = re.compile(r"\s*\S+|\s+$")


@row
class RecordedHit:
    """One passage that a search found."""

    text: str
    title: str = ""
    passage_id: str = ""
    score: Number = 0.0
    is_gold: Flag = False


@row
class RecordedTurn:
    """One turn. Without `kind` the method's grammar reads the action from the text.

    Attributes:
        text, tokens: what was written; `tokens` are its pieces, and one of both is enough.
        kind, content, queries: the action.
        observation, hits: what the environment appended, and the passages behind it.
        executed: whether the search ran; without it, one with `hits` (an empty list, too) or an observation did.
        reward, advantages, logprobs: of a recorded training; the first two are read over.
    """

    text: str | None = None
    tokens: list[str] | None = None
    kind: ActionKind | None = None
    content: str = ""
    queries: list[str] = field(default_factory=list)
    executed: Flag | None = None
    observation: str = ""
    hits: list[RecordedHit] | None = None
    reward: Any = None
    advantages: Any = None
    logprobs: list[Number] | None = None


@row
class RecordedRow:
    """One played question; see above. `decomposition` and `gold_passages` are what rewards of sub-questions read."""

    question: Text
    answers: list[Text] | None = None
    question_id: Text | None = None
    answer: str | None = None
    status: Status | None = None
    turns: list[RecordedTurn] = field(default_factory=list)
    dataset: Text = "recorded"
    hops: Hops = 1
    decomposition: list[Hop] = field(default_factory=list)
    gold_passages: list[Passage] = field(default_factory=list)
    gold_passage_ids: list[str] = field(default_factory=list)
    policy: str = ""
    seed: Count = 0
    step: Count | None = None
    mode: str = ""
    error: str | None = None
    prompt: Any = None
    outcome: Any = None
    notes: Any = None
    copy: Any = None
    part: Any = None
    is_right: Any = None
    golden: Any = None
    labels: Any = None
    reason: Any = None


@dataclass(frozen=True)
class Played:
    """A recorded trajectory.

    Attributes:
        number: of its row in the file, from 1.
        trajectory, question: what rewards read. Its tokens have no ids, since a record has none.
        pieces: the text of each token of the response.
        by: who played it, and when.
    """

    number: int
    trajectory: Trajectory
    question: Question
    pieces: tuple[str, ...]
    by: str


def read(path: Path, grammar: SearchGrammar, known: Mapping[str, Question]) -> list[Played]:
    """The trajectories of a file, in order.

    Args:
        path: a `.jsonl` file.
        grammar: reads actions from turns that have none.
        known: questions of this run by id; a row's own fields go before theirs.

    Raises:
        DataError: names file, row and field; or there is no row.
    """
    found = []
    for number, tree in read_jsonl(path):
        where = f"{path}: row {number}"
        if (fault := schema.fault(RecordedRow, tree)) is not None:
            raise DataError(f"{where}: {fault}. docs/methods-of-yours.md has the fields of a row.")
        found.append(_played(schema.parse(RecordedRow, tree, where), number, where, grammar, known))
    if not found:
        raise DataError(f"{path}: found no row, expected a recorded trajectory in each line.")
    return found


def _played(
    recorded: RecordedRow, number: int, where: str, grammar: SearchGrammar, known: Mapping[str, Question]
) -> Played:
    question = _question(recorded, where, known)
    turns = list(recorded.turns)
    if not turns and recorded.answer is not None:
        turns = [RecordedTurn(kind="answer", content=recorded.answer)]
    if not turns and recorded.status is None:
        raise DataError(f"{where}: found neither 'turns' nor 'answer', expected what was played.")

    made = list(_turns(turns, where, grammar))
    pieces = [piece for _, written, observed in made for piece in (*written, *observed)]
    mask = [is_own for _, written, observed in made for is_own in [True] * len(written) + [False] * len(observed)]
    last = made[-1][0].action if made else None
    answer = recorded.answer
    if answer is None and last is not None and last.kind == "answer" and recorded.status in (None, "answered"):
        answer = last.content

    by = " ".join(
        filter(None, (recorded.policy and f"{recorded.policy}-{recorded.seed}", recorded.mode, _step(recorded.step)))
    )
    trajectory = Trajectory(
        question_id=question.id,
        group_id=f"{question.id} {by}",
        prompt_ids=(),
        response_ids=(0,) * len(pieces),
        loss_mask=tuple(mask),
        sampler_logprobs=tuple(_logprobs(turns, made)),
        turns=tuple(turn for turn, _, _ in made),
        status=recorded.status or ("open" if answer is None else "answered"),
        answer=answer,
        error=recorded.error,
    )
    return Played(number, trajectory, question, tuple(pieces), by)


def _step(step: int | None) -> str:
    return "" if step is None else f"step {step}"


def _question(recorded: RecordedRow, where: str, known: Mapping[str, Question]) -> Question:
    """The question of this run's data with this id and this text, or one made of the row's own fields."""
    question = known.get(recorded.question_id or "")
    if question is None or question.question != recorded.question:
        if not recorded.answers:
            raise DataError(
                f"{where}: field 'answers': found none, and this run's data has no question {recorded.question_id!r} "
                'of this text. Write the right answers as a list, such as ["Paris"].'
            )
        question = Question(
            id=recorded.question_id or recorded.question,
            dataset=recorded.dataset,
            split="train",
            question=recorded.question,
            answers=tuple(recorded.answers),
            hops=max(recorded.hops, len(recorded.decomposition)),
            gold_passage_ids=tuple(recorded.gold_passage_ids),
        )

    given: dict[str, Any] = {"split": "train"}
    if recorded.answers:
        given["answers"] = tuple(recorded.answers)
    if recorded.decomposition:
        given["decomposition"] = tuple(recorded.decomposition)
    if recorded.gold_passages:
        given["gold_passages"] = tuple(recorded.gold_passages)
    return replace(question, **given)


_Made = tuple[Turn, list[str], list[str]]


def _turns(turns: list[RecordedTurn], where: str, grammar: SearchGrammar) -> Iterator[_Made]:
    """Each turn, the pieces that were written and those that were appended."""
    position = 0
    for number, recorded in enumerate(turns):
        text, action = _text_and_action(recorded, f"{where}: turns[{number}]", grammar)
        written = recorded.tokens if recorded.tokens is not None else _WORD.findall(text)
        observed = _WORD.findall(recorded.observation)

        end = position + len(written)
        executed = recorded.executed
        if executed is None:
            executed = action.kind == "search" and (recorded.hits is not None or bool(recorded.observation))

        turn = Turn(
            action=action,
            start=position,
            end=end,
            observation_end=end + len(observed),
            text=text,
            observation=recorded.observation,
            executed=executed,
            hits=tuple(Hit(hit.passage_id, hit.score, hit.title, hit.text) for hit in recorded.hits or ()),
        )
        position = turn.observation_end
        yield turn, written, observed


def _text_and_action(recorded: RecordedTurn, where: str, grammar: SearchGrammar) -> tuple[str, Action]:
    """The action as it was recorded, with the queries that the grammar reads where the record has none."""
    text = "".join(recorded.tokens) if recorded.tokens is not None else recorded.text
    if recorded.kind is None:
        if text is None:
            raise DataError(f"{where}: found neither 'text' nor 'kind', expected what the policy wrote.")
        return text, grammar.parse(text)
    action = Action(recorded.kind, recorded.content, tuple(recorded.queries))
    if text is None:
        return grammar.render(action), action
    read_again = grammar.parse(text)
    return text, read_again if (read_again.kind, read_again.content) == (action.kind, action.content) else action


def _logprobs(turns: list[RecordedTurn], made: list[_Made]) -> Iterator[float]:
    for recorded, (_, written, observed) in zip(turns, made, strict=True):
        known = recorded.logprobs
        yield from known if known is not None and len(known) == len(written) else [0.0] * len(written)
        yield from [0.0] * len(observed)
