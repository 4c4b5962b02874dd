"""Benchmark runs: play every evaluation question with one system and score each episode.

Each question is played greedily and, if asked for, once more by sampling with a fixed seed. Questions are played in
chunks. Finished chunks are kept in a scratch folder, so that an evaluation that was killed plays only the missing ones.
An outage of the search says nothing about a system, so it ends the evaluation, and the next attempt plays the chunks
with failed episodes again. `tasks.evaluate.statistics` averages the scores.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks import text
from tasks.records import schema
from tasks.records.scores import ScoreRow
from tasks.records.trajectories import TrajectoryRow, trajectory_row
from tasks.records.usage import ChunkUsage, Usage
from tasks.retrieval import RetrievalError
from tasks.retrieval.recall import holds
from tasks.store import DataError
from tasks.systems import System
from tasks.types import Episode, Mode, Question, Turn

MODES: tuple[Mode, ...] = typing.get_args(Mode)
_MEND = "Mend its file in tasks/systems/."


@dataclass(frozen=True)
class Evaluation:
    """Rows of `scores.jsonl` and `trajectories.jsonl`, and what services did: role -> counts."""

    scores: list[ScoreRow]
    trajectories: list[TrajectoryRow]
    usage: dict[str, Usage]


@schema.row
class PlayedRow:
    """One row of a finished chunk, with the trajectory if it is recorded, and with the error if the episode failed."""

    score: ScoreRow
    trajectory: TrajectoryRow | None
    error: str | None


def evaluate(
    system: System,
    questions: Sequence[Question],
    sampled: bool,
    name: str,
    seed: int,
    num_recorded: int,
    scratch: Path,
    max_failed_share: float = 0.0,
    progress: Callable[[str, int, float], object] = lambda mode, done, em: None,
    services: Mapping[str, Any] = MappingProxyType({}),
) -> Evaluation:
    """Play and score all questions.

    Args:
        system: plays the questions.
        questions: in order of id.
        sampled: also play at temperature 1.
        name, seed: written to every recorded trajectory; draws depend on the seed.
        num_recorded: trajectories kept per mode, spread evenly over the questions.
        scratch: folder of finished chunks.
        max_failed_share: largest share of episodes that may fail because a search failed; they score 0.
        progress: receives (mode, questions done, their exact match).
        services: those that the system calls, whose use is counted.

    Raises:
        RetrievalError: more episodes failed than that. Chunks with a failed episode are deleted; the next attempt uses
            the others.
        DataError: the system does not return one episode per question in order, or one with a value that its row
            cannot hold. Nothing of that chunk is kept.
    """
    if system.batch_questions < 1:
        raise DataError(f"system {name!r}: batch_questions={system.batch_questions}: expected 1 or more. {_MEND}")
    modes = MODES if sampled else MODES[:1]
    num_recorded = min(num_recorded, len(questions))
    recorded = {i * len(questions) // num_recorded for i in range(num_recorded)}
    failures = _Failures(max_failed_share, len(modes) * len(questions))
    played: list[PlayedRow] = []
    used = ChunkUsage(services)

    for mode in modes:
        num_right = 0.0
        for first in range(0, len(questions), system.batch_questions):
            chunk = questions[first : first + system.batch_questions]
            path = scratch / f"{mode}-{first:08d}.jsonl"
            if not path.is_file():
                # Each chunk has its own seed, so that its draws are the same after a kill.
                with used.counting(path):
                    episodes = list(system.play(chunk, mode, seed * 7919 + first))
                _check_order(episodes, chunk, name)
                shown = [first + i in recorded for i in range(len(chunk))]
                schema.write(path, _rows(system, episodes, chunk, shown, name, seed, mode))
            rows = [row for _, row in schema.read(PlayedRow, path)]
            failures.add(path, rows)
            used.add(path)
            played += rows
            num_right += sum(row.score.em for row in rows)
            progress(mode, first + len(chunk), num_right / (first + len(chunk)))

    scores = sorted((row.score for row in played), key=lambda score: (score.question_id, score.mode))
    return Evaluation(scores, [row.trajectory for row in played if row.trajectory is not None], used.total)


def _check_order(episodes: Sequence[Episode], questions: Sequence[Question], name: str) -> None:
    """Raise the DataError unless each question has its episode with an answer that can be scored."""
    if len(episodes) != len(questions):
        raise DataError(
            f"system {name!r}: found {len(episodes)} episodes for {len(questions)} questions, expected one for each "
            f"question, in order. {_MEND}"
        )
    for number, (episode, question) in enumerate(zip(episodes, questions, strict=True), 1):
        if episode.question_id != question.id:
            raise DataError(
                f"system {name!r}: episode {number} of {len(episodes)}: found question_id={episode.question_id!r}, "
                f"expected {question.id!r}: one episode for each question, in order. {_MEND}"
            )
        if not isinstance(episode.answer, str | None):
            raise DataError(
                f"system {name!r}: question {question.id!r}: found answer {episode.answer!r:.80} of type "
                f"{type(episode.answer).__name__}, expected text, or None without an answer. {_MEND}"
            )


def _rows(
    system: System,
    episodes: Sequence[Episode],
    questions: Sequence[Question],
    shown: Sequence[bool],
    name: str,
    seed: int,
    mode: Mode,
) -> list[PlayedRow]:
    rows = []
    for episode, question, is_shown in zip(episodes, questions, shown, strict=True):
        score = score_row(episode, question, mode)
        trajectory = None
        if is_shown:
            trajectory = trajectory_row(
                episode, question, policy=name, seed=seed, mode=mode, outcome=score.em, tokenizer=system.tokenizer
            )
        row = PlayedRow(score=score, trajectory=trajectory, error=episode.error)
        # A row that is refused when it is read would stay in the scratch folder and fail every later attempt.
        if fault := schema.fault_in(row):
            raise DataError(f"system {name!r}: question {question.id!r}: {fault}. {_MEND}")
        rows.append(row)
    return rows


@dataclass
class _Failures:
    """Counts failed episodes and the chunks that contain them."""

    max_share: float
    num_episodes: int
    num_failed: int = 0
    chunks: list[Path] = field(default_factory=list)

    def add(self, path: Path, rows: Sequence[PlayedRow]) -> None:
        """Count a chunk; see `evaluate` for what is raised."""
        failed = [row for row in rows if row.score.status == "failed"]
        if not failed:
            return
        self.num_failed += len(failed)
        self.chunks.append(path)
        if self.num_failed > self.max_share * self.num_episodes:
            for chunk in self.chunks:
                chunk.unlink(missing_ok=True)
            raise RetrievalError(
                f"evaluation: {self.num_failed} of {self.num_episodes} episodes could not search, at most a "
                f"share of {self.max_share:g} may (evaluate.max_failed_share). Question "
                f"{failed[0].score.question_id}: {failed[0].error} Mend the search and start again; chunks "
                "without a failure are kept."
            )


def score_row(episode: Episode, question: Question, mode: Mode) -> ScoreRow:
    """One question's scores.

    A failed episode scores 0, whatever it found or answered before its search failed; its status marks it.
    """
    has_failed = episode.status == "failed"
    answer = None if has_failed else episode.answer
    gold = set(question.gold_passage_ids)
    retrieved = {hit.passage_id for turn in episode.turns for hit in turn.hits if not has_failed}
    # Without all gold passages known, a recall would count unknown ones as missed.
    recall = len(gold & retrieved) / len(gold) if gold and question.gold_complete else None
    in_passage, shown = _answer_found(() if has_failed else episode.turns, question)

    return ScoreRow(
        question_id=question.id,
        dataset=question.dataset,
        split=question.split,
        hops=question.hops,
        type=question.type,
        mode=mode,
        em=text.exact_match(answer, question.answers),
        f1=text.f1(answer, question.answers),
        subem=text.substring_match(answer, question.answers),
        searches=episode.num_searches,
        actions=len(episode.turns),
        valid_actions=sum(turn.action.kind != "invalid" for turn in episode.turns),
        recall=recall,
        answer_in_passage=in_passage,
        answer_shown=shown,
        status=episode.status,
        generated_tokens=episode.cost.generated_tokens,
        prefill_tokens=episode.cost.prefill_tokens,
        answer=episode.answer,
    )


def _answer_found(turns: Sequence[Turn], question: Question) -> tuple[float | None, float | None]:
    """Whether a returned passage (title and text) holds a gold answer, and whether the policy was shown it.

    Both are None where `text.findable` looks for no answer.
    """
    answers = text.findable(question.answers)
    if not answers:
        return None, None
    holding = [turn for turn in turns if any(holds(hit, answers) for hit in turn.hits)]
    return float(bool(holding)), float(any(_shows(turn, answers) for turn in holding))


def _shows(turn: Turn, answers: Sequence[str]) -> bool:
    """Whether the observation, which may be cut, holds an answer; a system that records none has shown all."""
    # Inside a JSON string a line break is written \n, and its letter would become part of the next word.
    return not turn.observation or text.contains_any(turn.observation.replace("\\n", " "), answers)
