"""Scored trajectories as lines of at most 100 columns for a terminal, and as JSON for programs.

Recorded text may hold anything, so no character of it can move a cursor (`tasks.tool.script.harmless`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tasks.rl.method import Method
from tasks.score import Column, Scored, columns, placed, signal
from tasks.tool.script import harmless
from tasks.types import Note, Scores, Trajectory

WIDTH = 100
_DIM, _GOOD, _BAD, _PLAIN = "\x1b[2m", "\x1b[1;32m", "\x1b[31m", "\x1b[0m"


def trajectory_lines(scored: Scored, has_colours: bool = False) -> list[str]:
    """What was played, what each reward gave to it, where and why, the total and the advantage."""
    played = scored.played
    trajectory = played.trajectory
    answers = " | ".join(played.question.answers)
    lines = [
        _fitted(f"{played.number}  {played.question.question}"),
        _fitted(f"   answers: {answers}"),
        _fitted(f"   {trajectory.status}: {trajectory.answer if trajectory.answer is not None else '(no answer)'}"),
    ]
    lines += [_fitted(f"   played by {played.by}")] if played.by else []
    lines += [_turn_line(trajectory, number) for number in range(len(trajectory.turns))]
    for kind, scores in scored.by_reward.items():
        lines += _reward_lines(kind, scores, played.trajectory, played.pieces)

    total = f"   total {_number(placed(scored.total))}{_advantage(scored)}"
    total += "" if scored.is_kept else "   (the filter leaves it out)"
    if not has_colours:
        return [*lines, total, ""]
    colour = _GOOD if placed(scored.total) > 0 else _BAD if placed(scored.total) < 0 else ""
    dim = 3 + bool(played.by) + len(trajectory.turns)
    head, *rest = [f"{_DIM}{line}{_PLAIN}" if 0 < i < dim else line for i, line in enumerate(lines)]
    return [head, *rest, f"{colour}{total}{_PLAIN if colour else ''}", ""]


def _cut(text: str, most: int) -> str:
    """One harmless line of at most so many characters."""
    line = harmless(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _fitted(text: str) -> str:
    indent = text[: len(text) - len(text.lstrip())]
    return indent + _cut(text.lstrip(), WIDTH - len(indent))


def _turn_line(trajectory: Trajectory, number: int) -> str:
    turn = trajectory.turns[number]
    what = " ; ".join(turn.action.searches) or turn.action.content or turn.text
    found = f" -> {len(turn.hits)} passages" if turn.executed else ""
    return f"   turn {number + 1}  {turn.action.kind:7}  {_cut(what, WIDTH - 40)}{found}"


def _reward_lines(kind: str, scores: Scores, trajectory: Trajectory, pieces: Sequence[str]) -> Iterator[str]:
    """A line for each value that lies on a token, then what the reward says it was made of."""
    name = _cut(kind, 24)
    for position, value in scores.placed or ((-1, scores.outcome),):
        yield f"   {name:24} {_number(value):>8}  {_place(position, trajectory, pieces)}"
    parts = "  ".join(f"{key} {_number(value)}" for key, value in scores.components.items())
    for part in [*textwrap.wrap(_cut(parts, 10 * WIDTH), WIDTH - 41), *map(_note, scores.notes)]:
        yield f"{'':38}{part}"


def _place(position: int, trajectory: Trajectory, pieces: Sequence[str]) -> str:
    if position < 0:
        return "on no token: the policy wrote none" if trajectory.last_generated < 0 else "nowhere"
    number = next((i for i, turn in enumerate(trajectory.turns, 1) if turn.start <= position < turn.observation_end), 0)
    turn = f"turn {number}, " if number else ""
    return f"on {turn}token {position + 1} of {len(pieces)} {_cut(pieces[position].strip(), 20)!r}"


def _note(note: Note) -> str:
    value = "" if note.value is None else f" {_number(note.value)}"
    where = f"turn {note.turn + 1}" if note.turn >= 0 else "question"
    return _cut(f"{where}: {note.name}{value} {note.text}", WIDTH - 42)


def _advantage(scored: Scored) -> str:
    if scored.advantages is None:
        return ""
    own = [a for a, is_own in zip(scored.advantages, scored.played.trajectory.loss_mask, strict=True) if is_own]
    if not own:
        return ""
    least, most = min(own), max(own)
    return f"   advantage {least:+.3f}" + (f" to {most:+.3f}" if most - least > 5e-4 else "")


def _number(value: float) -> str:
    return f"{value:.3f}"


def summary_lines(method: Method, scored: Sequence[Scored], num_failed: int) -> list[str]:
    """A table of what each reward gave to all trajectories, and whether its groups can teach."""
    lines = [f"{'reward':28} {'mean':>8} {'non-zero':>9} {'min':>8} {'max':>8}"]
    for kind, column in columns(scored).items():
        numbers = (
            f"{_number(column.mean):>8} {column.nonzero:>9.2f} {_number(column.least):>8} {_number(column.most):>8}"
        )
        lines.append(f"{_cut(kind, 25):28} {numbers}")
    groups, share = signal(scored)
    told = f"Trajectories: {len(scored)}, of which the filter keeps {sum(one.is_kept for one in scored)}."
    told += f" {num_failed} failed ones left out." if num_failed else ""
    if groups:
        told += f" Questions with two or more: {groups}; outcomes differ in {share:.2f} of them."
    lines += ["", *textwrap.wrap(told, WIDTH)]
    if not groups and method.advantage.compares_group:
        lines.append("No two trajectories are of one question, so there is no advantage within a group.")
    elif method.advantage.needs_values:
        lines.append("The advantage needs the critic of a training, so none is shown.")
    return lines


def trajectory_tree(scored: Scored) -> dict[str, Any]:
    """One scored trajectory as JSON."""
    played = scored.played
    return {
        "row": played.number,
        "question_id": played.question.id,
        "answer": played.trajectory.answer,
        "rewards": {kind: _scores_tree(scores, played.trajectory) for kind, scores in scored.by_reward.items()},
        "total": placed(scored.total),
        "outcome": scored.total.outcome,
        "advantages": None if scored.advantages is None else [round(one, 6) for one in scored.advantages],
        "is_kept": scored.is_kept,
    }


def _scores_tree(scores: Scores, trajectory: Trajectory) -> dict[str, Any]:
    turns = trajectory.turns
    number_of = {position: i for i, turn in enumerate(turns) for position in range(turn.start, turn.observation_end)}
    return {
        "outcome": scores.outcome,
        "placed": [{"token": at, "turn": number_of.get(at), "value": value} for at, value in scores.placed],
        "components": dict(scores.components),
        "notes": [asdict(note) for note in scores.notes],
    }


def summary_tree(scored: Sequence[Scored], num_failed: int) -> dict[str, Any]:
    """The table of `summary_lines` as JSON."""
    groups, share = signal(scored)
    table: dict[str, Column] = columns(scored)
    return {
        "trajectories": len(scored),
        "failed": num_failed,
        "rewards": {kind: asdict(column) for kind, column in table.items()},
        "groups": groups,
        "share_with_signal": share,
        "kept": sum(one.is_kept for one in scored),
    }
