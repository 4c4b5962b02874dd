"""A row of `trajectories.jsonl`: one played question as the viewer shows it and the data checks read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, Strict

from tasks.conf import require
from tasks.records.schema import Count, Number, row
from tasks.types import ActionKind, Episode, Flag, Hops, Mode, Note, Question, Scores, Status, Text, Trajectory, Turn

Logprob = Annotated[Number, Field(le=1e-4)]  # Rounding of a log-softmax may lift a certain token a little above 0.


@row
class HitRow:
    """One retrieved passage; `is_gold` where the question's annotation names it."""

    passage_id: str
    title: str
    text: str
    score: Number
    is_gold: Flag


@row
class TurnRow:
    """One turn: its text, its rewards, and the observation.

    Attributes:
        kind, content, executed: the action that was read from the text, and whether it was a search that was run.
        reward: sum of the rewards placed in this turn.
        tokens: text of each token that was written, null where tokens are not known.
        advantages: one per token, null outside training.
        logprobs: natural log, one per token, null where they are not known.
        text: what was written, only where tokens are not known.
        observation, hits: what the environment appended, and the passages behind it.
    """

    kind: ActionKind
    content: str
    executed: Flag
    reward: Number
    tokens: list[str] | None
    advantages: list[Number] | None
    logprobs: list[Logprob] | None
    text: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    observation: str
    hits: list[HitRow]


@row
class NoteRow:
    """What a reader shall see beside a turn: see `tasks.types.Note`. Fields without content are left out."""

    turn: Annotated[int, Strict(), Field(ge=-1)]
    name: Text
    value: Annotated[Number | None, Field(exclude_if=lambda value: value is None)] = None
    text: Annotated[str, Field(min_length=0, exclude_if=lambda text: not text)] = ""
    taken: Annotated[Flag | None, Field(exclude_if=lambda taken: taken is None)] = None


@row
class TrajectoryRow:
    """One played question.

    Attributes:
        question_id, question, answers, gold_passage_ids, dataset, hops: of the question.
        policy, seed, mode: who played it, and how.
        step: of training, null in an evaluation.
        status, answer: how it ended.
        prompt: the text that was continued, null where a system has no single one.
        outcome: the reward of the outcome; in an evaluation exact match.
        turns: in order.
        notes: of its rewards, by turn; left out where there are none.
    """

    question_id: Text
    question: Text
    answers: Annotated[list[Text], Field(min_length=1)]
    gold_passage_ids: list[str]
    dataset: Text
    hops: Hops
    policy: Text
    seed: Count
    step: Count | None
    mode: Mode
    status: Status
    answer: str | None
    prompt: Text | None
    outcome: Number
    turns: list[TurnRow]
    notes: Annotated[list[NoteRow], Field(exclude_if=lambda notes: not notes)] = field(default_factory=list)


def trajectory_row(
    episode: Episode,
    question: Question,
    *,
    policy: str,
    seed: int,
    mode: Mode,
    step: int | None = None,
    outcome: float = 0.0,
    tokenizer: Any = None,
    scores: Scores | None = None,
    advantages: Sequence[float] | None = None,
) -> TrajectoryRow:
    """The row of one played question.

    Args:
        episode, question: what was played.
        policy, seed, mode, step: see `TrajectoryRow`.
        outcome: taken if there are no `scores`.
        tokenizer: decodes the tokens of a trajectory.
        scores: rewards of training.
        advantages: one per response token.

    Raises:
        ValueError: a note names a turn that the episode does not have.
    """
    prompt = None
    if isinstance(episode, Trajectory):
        prompt = tokenizer.decode(list(episode.prompt_ids), skip_special_tokens=False)
    gold = set(question.gold_passage_ids)
    placed = dict(scores.placed) if scores else {}
    notes = scores.notes if scores else ()

    return TrajectoryRow(
        question_id=question.id,
        question=question.question,
        answers=list(question.answers),
        gold_passage_ids=list(question.gold_passage_ids),
        dataset=question.dataset,
        hops=question.hops,
        policy=policy,
        seed=seed,
        step=step,
        mode=mode,
        status=episode.status,
        answer=episode.answer,
        prompt=prompt,
        outcome=scores.outcome if scores else outcome,
        turns=[_turn_row(turn, episode, gold, tokenizer, placed, advantages) for turn in episode.turns],
        notes=[_note_row(note, len(episode.turns)) for note in sorted(notes, key=lambda note: note.turn)],
    )


def _note_row(note: Note, num_turns: int) -> NoteRow:
    require(note.turn < num_turns, f"note {note.name!r}: turn", note.turn, f"-1 to {num_turns - 1}")
    # A model's text may hold half of a surrogate pair, which no file of UTF-8 can.
    name, text = (part.encode("utf-8", "replace").decode() for part in (note.name, note.text))
    value = None if note.value is None else round(float(note.value), 6)
    return NoteRow(turn=note.turn, name=name, value=value, text=text, taken=note.taken)


def _turn_row(
    turn: Turn,
    episode: Episode,
    gold: set[str],
    tokenizer: Any,
    placed: Mapping[int, float],
    advantages: Sequence[float] | None,
) -> TurnRow:
    written = range(turn.start, turn.end)
    tokens, logprobs, text = None, None, None
    if isinstance(episode, Trajectory):
        tokens = pieces(tokenizer, episode.response_ids[turn.start : turn.end])
        logprobs = [round(episode.sampler_logprobs[i], 6) for i in written]
    else:
        text = turn.text

    return TurnRow(
        kind=turn.action.kind,
        content=turn.action.content,
        executed=turn.executed,
        reward=sum(value for position, value in placed.items() if position in written),
        tokens=tokens,
        advantages=[round(advantages[i], 6) for i in written] if advantages is not None else None,
        logprobs=logprobs,
        text=text,
        observation=turn.observation,
        hits=[
            HitRow(
                passage_id=hit.passage_id,
                title=hit.title,
                text=hit.text,
                score=round(float(hit.score), 4),
                is_gold=hit.passage_id in gold,
            )
            for hit in turn.hits
        ],
    )


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token; a character whose bytes are split over tokens belongs to the token that completes it.

    The pieces join to exactly the decoded text, so bytes that form no character go to the next complete piece.
    """
    texts = []
    start = 0
    for i in range(len(ids)):
        decoded = tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False)
        if decoded.endswith("\ufffd") and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(decoded)
        start = i + 1
    return texts
