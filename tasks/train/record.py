"""A trajectory as a row of `trajectories.jsonl`: what the report's viewer and the data checks read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.types import Question, Scores, Trajectory


def trajectory_row(
    trajectory: Trajectory,
    question: Question,
    tokenizer: Any,
    scores: Scores | None,
    advantages: Sequence[float] | None,
) -> dict[str, Any]:
    """One JSON-ready row.

    Args:
        trajectory, question: what was played.
        tokenizer: decodes single tokens for the viewer.
        scores: rewards; None where none were given (then 0).
        advantages: one per response token, None outside training.
    """
    placed = dict(scores.placed) if scores else {}
    gold = set(question.gold_passage_ids)
    turns = []
    for turn in trajectory.turns:
        own = range(turn.start, turn.end)
        turns.append({
            "kind": turn.action.kind,
            "content": turn.action.content,
            "executed": turn.executed,
            "reward": sum(value for position, value in placed.items() if turn.start <= position < turn.end),
            "tokens": pieces(tokenizer, trajectory.response_ids[turn.start : turn.end]),
            "advantages": [round(advantages[i], 6) for i in own] if advantages is not None else None,
            "logprobs": [round(trajectory.sampler_logprobs[i], 6) for i in own],
            "observation": turn.observation,
            "hits": [
                {"passage_id": h.passage_id, "title": h.title, "text": h.text, "score": round(float(h.score), 4),
                 "is_gold": h.passage_id in gold}
                for h in turn.hits
            ],
        })  # fmt: skip
    return {
        "question_id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        "gold_passage_ids": list(question.gold_passage_ids),
        "dataset": question.dataset,
        "hops": question.hops,
        "status": trajectory.status,
        "answer": trajectory.answer,
        "prompt": tokenizer.decode(list(trajectory.prompt_ids), skip_special_tokens=False),
        "outcome": scores.outcome if scores else 0.0,
        "turns": turns,
    }


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token; bytes of one character split over tokens are shown on the token that completes it.

    The pieces join to exactly the decoded text, so bytes that never make a character wait for the next that does.
    """
    texts, start = [], 0
    for i in range(len(ids)):
        decoded = tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False)
        if decoded.endswith("\ufffd") and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(decoded)
        start = i + 1
    return texts
