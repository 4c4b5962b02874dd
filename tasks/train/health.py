"""Metrics of a batch of rollouts, and rules that stop a run that has collapsed.

Both are pure functions of what was played and reported, so that a resumed run comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks import text
from tasks.conf import require
from tasks.rl.filters import by_group, share_with_signal
from tasks.rl.method import component_means
from tasks.types import Sample, Scores, Trajectory

SUCCESS = ("em", "subem", "f1")
"""Score components that mean success; the first one that a method has is taken."""


@dataclass(frozen=True)
class CollapseConf:
    """When a run is hopeless; null switches a rule off.

    Attributes:
        patience: consecutive steps for which a rule about steps must hold.
        min_valid_action_rate: the share of actions that the grammar can read falls below this.
        max_approx_kl: the distance of the policy from the one that played exceeds this.
        max_validation_drop: validation EM falls by more than this share of the best so far, twice in a row.
        max_skipped: so many updates in a row that were skipped because the filter kept too little.
    """

    patience: int
    min_valid_action_rate: float | None
    max_approx_kl: float | None
    max_validation_drop: float | None
    max_skipped: int | None

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience", self.patience, "at least 1")
        for name in ("min_valid_action_rate", "max_validation_drop"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1, name, value, "null or a share between 0 and 1")
        for name in ("max_approx_kl", "max_skipped"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "null or a positive number")

    def reason(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        """Why the run with this history should stop, None if it should not.

        Args:
            history: rows {"step", "metrics"} in order, as in `metrics.jsonl`.
        """
        steps = [row["metrics"] for row in history if row["step"] > 0]

        low, high = self.min_valid_action_rate, self.max_approx_kl
        if low is not None and self._lasts(steps, "valid_action_rate", lambda value: value < low):
            return f"valid_action_rate was below {low:g} for {self.patience} steps"
        if high is not None and self._lasts(steps, "approx_kl", lambda value: value > high):
            return f"approx_kl was above {high:g} for {self.patience} steps"

        recent = steps[-self.max_skipped :] if self.max_skipped else []
        if len(recent) == self.max_skipped and all(metrics.get("skipped_update") for metrics in recent):
            return f"{self.max_skipped} updates in a row were skipped: too few groups were left to learn from"
        return self._drop_of_validation(history)

    def _lasts(self, steps: Sequence[Mapping[str, float]], name: str, holds: Callable[[float], bool]) -> bool:
        recent = steps[-self.patience :]
        return len(recent) == self.patience and all(name in metrics and holds(metrics[name]) for metrics in recent)

    def _drop_of_validation(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        if self.max_validation_drop is None:
            return None
        ems = [row["metrics"]["validation_em"] for row in history if "validation_em" in row["metrics"]]
        if len(ems) < 3:
            return None
        floor = (1 - self.max_validation_drop) * max(ems)
        if max(ems[-2:]) >= floor:
            return None
        return f"validation EM fell from {max(ems):.3f} to {ems[-2]:.3f} and {ems[-1]:.3f}"


def rollout_metrics(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], scores: Sequence[Scores], num_played: int
) -> dict[str, float]:
    """Metrics of a batch of rollouts: rewards of samples; lengths, searches and validity of trajectories.

    Shares of groups are given only where some group has two members. `share_all_zero` and `share_all_one` are the
    shares of groups in which every trajectory failed or succeeded, by the first score component of `SUCCESS`.
    """
    count, num_samples = len(trajectories), len(samples)
    turns = [turn for t in trajectories for turn in t.turns]
    mean = sum(s.outcome for s in scores) / num_samples

    return {
        "reward_mean": mean,
        "reward_std": (sum((s.outcome - mean) ** 2 for s in scores) / max(num_samples - 1, 1)) ** 0.5,
        **component_means(sorted({name for s in scores for name in s.components}), [s.components for s in scores]),
        "num_searches": sum(t.num_searches for t in trajectories) / count,
        "repeated_query_rate": repeated_query_rate(trajectories),
        "response_tokens": sum(len(t.response_ids) for t in trajectories) / count,
        "generated_tokens": sum(t.num_generated for t in trajectories) / count,
        "valid_action_rate": sum(turn.action.kind != "invalid" for turn in turns) / max(len(turns), 1),
        "truncated_rate": sum(t.status in ("overflow", "open") for t in trajectories) / count,
        "usable_rate": count / num_played,
        **_group_metrics(samples, scores),
    }


def answer_metrics(trajectories: Sequence[Trajectory], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and length of the answers, whatever is rewarded: long answers please subEM."""
    answers = [t.answer for t in trajectories]
    num_words = [len(answer.split()) for answer in answers if answer is not None]
    ems = [text.exact_match(answer, of_question) for answer, of_question in zip(answers, golds, strict=True)]
    return {"em_mean": sum(ems) / len(ems), "answer_words": sum(num_words) / max(len(num_words), 1)}


def _group_metrics(samples: Sequence[Sample], scores: Sequence[Scores]) -> dict[str, float]:
    if len({sample.group_id for sample in samples}) == len(samples):
        return {}
    metrics = {"share_with_signal": share_with_signal(samples, scores)}
    success = next((name for name in SUCCESS if all(name in score.components for score in scores)), None)
    if success is not None:
        groups = by_group(samples, [score.components[success] for score in scores]).values()
        metrics["share_all_zero"] = sum(max(values) <= 0 for values in groups) / len(groups)
        metrics["share_all_one"] = sum(min(values) >= 1 for values in groups) / len(groups)
    return metrics


def repeated_query_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of executed queries that repeat an earlier one of their trajectory, normalised; 0 without queries."""
    num_queries = num_repeated = 0
    for trajectory in trajectories:
        seen: set[str] = set()
        for query in (q for turn in trajectory.turns if turn.executed for q in turn.action.searches):
            key = text.normalize(query)
            num_queries += 1
            num_repeated += key in seen
            seen.add(key)
    return num_repeated / max(num_queries, 1)
