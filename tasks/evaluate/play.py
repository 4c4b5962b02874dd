"""Benchmark runs: play every evaluation question with one policy and score each trajectory.

Greedy, and once sampled with a fixed seed. The full set is played, last batch included; finished chunks are
kept in a scratch folder, so a killed evaluation plays only what is missing. An outage of the search is no property of
a policy: it ends the evaluation, and what it spoiled is played again. Statistics live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import text
from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.retrieval import RetrievalError
from tasks.store import read_jsonl, write_jsonl
from tasks.train.record import trajectory_row
from tasks.types import Question, Trajectory

MODES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class Evaluation:
    """Rows of `scores.jsonl` and `trajectories.jsonl`."""

    scores: list[dict[str, Any]]
    trajectories: list[dict[str, Any]]


def evaluate(
    player: Player,
    questions: Sequence[Question],
    sampled: bool,
    policy: str,
    seed: int,
    num_recorded: int,
    scratch: Path,
    max_failed_share: float = 0.0,
    progress: Callable[[str, int], object] = lambda mode, done: None,
) -> Evaluation:
    """Play and score all questions.

    Args:
        player: the policy with its retriever and budgets.
        questions: in order of id.
        sampled: also play at temperature 1.
        policy, seed: written to every row.
        num_recorded: trajectories kept per mode, spread evenly over the questions.
        scratch: finished chunks.
        max_failed_share: of all trajectories, how many may fail because a search did; they score 0.
        progress: receives (mode, questions done).

    Raises:
        RetrievalError: more failed. Chunks with a failure are forgotten, the others are kept for the next attempt.
    """
    scores: list[dict[str, Any]] = []
    trajectories: list[dict[str, Any]] = []
    num_recorded = min(num_recorded, len(questions))
    recorded = {i * len(questions) // num_recorded for i in range(num_recorded)}
    chunk = player.conf.batch_rows
    modes = tuple(MODES) if sampled else ("greedy",)
    failures = _Failures(max_failed_share, len(modes) * len(questions))
    for mode in modes:
        for first in range(0, len(questions), chunk):
            path = scratch / f"{mode}-{first:08d}.jsonl"
            if not path.is_file():
                some = questions[first : first + chunk]
                played = player.play(some, 1, Sampling(MODES[mode], 1.0, (), seed=seed * 7919 + first))
                rows = []
                for i, (trajectory, question) in enumerate(zip(played, some, strict=True), first):
                    row: dict[str, Any] = {"score": score_row(trajectory, question, mode), "error": trajectory.error}
                    if i in recorded:
                        shown = trajectory_row(trajectory, question, player.tokenizer, None, None)
                        shown |= {"policy": policy, "seed": seed, "step": None, "mode": mode}
                        shown["outcome"] = row["score"]["em"]
                        row["trajectory"] = shown
                    rows.append(row)
                write_jsonl(path, rows)
            rows = [row for _, row in read_jsonl(path)]
            failures.add(path, rows)
            scores += [row["score"] for row in rows]
            trajectories += [row["trajectory"] for row in rows if "trajectory" in row]
            progress(mode, min(first + chunk, len(questions)))
    scores.sort(key=lambda row: (row["question_id"], row["mode"]))
    return Evaluation(scores, trajectories)


@dataclass
class _Failures:
    """Chunks in which searches failed, and how many may."""

    max_share: float
    num_trajectories: int
    num_failed: int = 0
    chunks: list[Path] = field(default_factory=list)

    def add(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        """Count a chunk; see `evaluate` for what is raised."""
        failed = [row for row in rows if row["score"]["status"] == "failed"]
        if not failed:
            return
        self.num_failed += len(failed)
        self.chunks.append(path)
        if self.num_failed > self.max_share * self.num_trajectories:
            for spoiled in self.chunks:
                spoiled.unlink(missing_ok=True)
            raise RetrievalError(
                f"evaluation: {self.num_failed} of {self.num_trajectories} trajectories could not search, at most a "
                f"share of {self.max_share:g} may (evaluate.max_failed_share). Question "
                f"{failed[0]['score']['question_id']}: {failed[0]['error']} Mend the search and start again: what was "
                "played without a failure is kept."
            )


def score_row(trajectory: Trajectory, question: Question, mode: str) -> dict[str, Any]:
    """One question's scores; a failed trajectory scores 0 and is marked by its status."""
    gold = set(question.gold_passage_ids)
    found = {hit.passage_id for turn in trajectory.turns for hit in turn.hits}
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "split": question.split,
        "hops": question.hops,
        "type": question.type,
        "mode": mode,
        "em": text.exact_match(trajectory.answer, question.answers),
        "f1": text.f1(trajectory.answer, question.answers),
        "subem": text.substring_match(trajectory.answer, question.answers),
        "searches": trajectory.num_searches,
        "actions": len(trajectory.turns),
        "valid_actions": sum(turn.action.kind != "invalid" for turn in trajectory.turns),
        "recall": len(gold & found) / len(gold) if gold and question.gold_complete else None,
        "status": trajectory.status,
        "generated_tokens": trajectory.num_generated,
        "prefill_tokens": len(trajectory.prompt_ids) + len(trajectory.response_ids) - trajectory.num_generated,
        "answer": trajectory.answer,
    }
