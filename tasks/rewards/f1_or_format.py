"""ReSearch's reward: the answer's F1, and a little for the format alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, on_last_token
from tasks.types import Question, Scores, Trajectory


@dataclass(frozen=True)
class F1OrFormat(EachReward):
    """F1 if above 0, else `format_reward` where the format is right, else 0; on the last token the policy wrote.

    ReSearch Section 2 (arXiv 2503.19470; docs/methods/research.md). In the released code the format is a gate:
    ReSearch re_search.py:149 (Agent-RL/ReSearch@c820a43; docs/methods/research.md)
    """

    components: ClassVar[tuple[str, ...]] = ("f1", "format")

    format_reward: float

    def __post_init__(self) -> None:
        require(0 <= self.format_reward < 1, "format_reward", self.format_reward, "from 0, below a right answer's 1")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        f1 = text.f1(trajectory.answer, question.answers)
        is_right = is_well_formed(trajectory)
        return on_last_token(trajectory, f1 or self.format_reward * is_right, f1=f1, format=float(is_right))


def is_well_formed(trajectory: Trajectory) -> bool:
    """Every turn is valid and begins with a thought, tags come in pairs, and a non-empty answer ends the response.

    Where the grammar demands a boxed answer, one without a box counts as empty (`SearchGrammar.boxed`).
    """
    if trajectory.status != "answered" or not (trajectory.answer or "").strip():
        return False
    if any(turn.action.kind == "invalid" for turn in trajectory.turns):
        return False
    texts = [turn.text for turn in trajectory.turns]
    return all(_is_turn(written) for written in texts) and "".join(texts).rstrip().endswith("</answer>")


def _is_turn(written: str) -> bool:
    """Whether a turn is one closed thought, then one search or one answer."""
    tags = re.findall(r"</?(?:think|search|answer|result)>", written)
    return tags in [["<think>", "</think>", f"<{kind}>", f"</{kind}>"] for kind in ("search", "answer")]


PART = F1OrFormat
