"""A row of `variance.jsonl`: how far the advantages of a question spread, with complete and with truncated sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tasks.records.schema import Count, Number, row
from tasks.types import Text

Square = Annotated[Number, Field(ge=0)] | None


@row
class VarianceRow:
    """Mean squares of centred advantages, which are their variances; null where no sample reached the turn.

    Attributes:
        policy: the policy before or after training.
        question_id: the question that was played.
        turn: from 1; 0 is all turns together.
        truncated: candidates for this turn from one prefix, against their mean.
        full: complete trajectories that reached this turn, the sum of their rewards against the group's mean; the group
            has as many trajectories as a step has candidates.
        full_at_tokens: the same, with as many trajectories as cost the tokens of truncated sampling.
        num_turns: turns of the trajectory whose prefixes were continued.
        group: trajectories behind `full_at_tokens`.
    """

    policy: Literal["start", "trained"]
    question_id: Text
    turn: Count
    truncated: Square
    full: Square
    full_at_tokens: Square
    num_turns: Count
    group: Count
