"""A row of `scores.jsonl`: how one question was answered in one mode."""

from __future__ import annotations

from tasks.records.schema import Count, Match, Share, row
from tasks.types import Hops, Mode, Split, Status, Text


@row
class ScoreRow:
    """One question's scores; a failed episode scores 0.

    Attributes:
        question_id, dataset, split, hops, type: of the question.
        mode: greedy play, or sampled at temperature 1.
        em, f1, subem: exact match, word F1 and substring match of the answer.
        searches, actions, valid_actions: counts; an action that could not be read is not valid.
        recall: share of the gold passages that were retrieved, null where not all gold passages are known.
        answer_in_passage: whether a passage that a search returned holds a gold answer as whole words, null where
            that says nothing (see `tasks.text.findable`).
        answer_shown: the same of what the policy was shown of these passages, which may be cut to a budget.
        status: how the episode ended.
        generated_tokens, prefill_tokens: its cost.
        answer: null without one.
    """

    question_id: Text
    dataset: Text
    split: Split
    hops: Hops
    type: str | None
    mode: Mode
    em: Match
    f1: Share
    subem: Match
    searches: Count
    actions: Count
    valid_actions: Count
    recall: Share | None
    answer_in_passage: Match | None
    answer_shown: Match | None
    status: Status
    generated_tokens: Count
    prefill_tokens: Count
    answer: str | None
