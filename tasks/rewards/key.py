"""StepSearch's search-key reward: do the queries resemble the reference queries of each sub-question?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import text
from tasks.conf import require
from tasks.rewards import EachReward, Field, on_last_token
from tasks.rewards.format import follows_search_rule
from tasks.types import Question, Scores, Trajectory


def key_score(queries: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """(1/M) sum_i max_j max_t F1(query t, reference j of sub-question i); 0 without queries or sub-questions.

    A sub-question without references scores 0 and still counts in M.
    StepSearch Eq. 4, Eq. 5 (arXiv 2505.15107; docs/methods/stepsearch.md)

    >>> key_score(["capital of France"], [["capital of France"], ["population of Paris"]])
    0.6666666666666666
    """
    if not references:
        return 0.0
    best = [max((text.f1(query, keys) for query in queries), default=0.0) for keys in references]
    return sum(best) / len(references)


def key_score_as_released(queries: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The released code: each query sets the credit of its best sub-question, over a better one too; F1 to four places.

    StepSearch qa_step.py:176 (Zillwang/StepSearch@43215ba; docs/methods/stepsearch.md)

    >>> key_score_as_released(["capital of France", "France"], [["capital of France"], ["population of Paris"]])
    0.25
    """
    credited = [0.0] * len(references)
    for query in queries:
        scores = [round(text.f1(query, keys), 4) for keys in references]
        if scores and max(scores) > 0:
            best = scores.index(max(scores))
            credited[best] = scores[best]
    return sum(credited) / len(references) if references else 0.0


@dataclass(frozen=True)
class KeyReward(EachReward):
    """weight * key score over executed queries, on the last token the policy wrote; 0 in a wrong format.

    Reference queries are those of `Question.decomposition`, resolved (stage `augment`).
    StepSearch Eq. 6 (arXiv 2505.15107; docs/methods/stepsearch.md)

    Attributes:
        weight: gamma_key; 0.618 as released, not given in the paper.
        as_released: score by `key_score_as_released`.
    """

    components: ClassVar[tuple[str, ...]] = ("key",)

    weight: float = 0.618
    as_released: bool = False

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight", self.weight, "0 or more")

    @property
    def reads(self) -> tuple[Field, ...]:
        """Reference queries of the sub-questions."""
        return ("decomposition", "queries")

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        queries = [query for turn in trajectory.turns if turn.executed for query in turn.action.searches]
        rule = key_score_as_released if self.as_released else key_score
        value = rule(queries, [hop.queries for hop in question.decomposition])
        earned = value if follows_search_rule(trajectory) else 0.0
        return on_last_token(trajectory, self.weight * earned, key=value)


PART = KeyReward
