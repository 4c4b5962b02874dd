"""Records some trajectories that were learned from, as rows for the report's viewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.records import schema
from tasks.records.trajectories import trajectory_row
from tasks.rewards import total
from tasks.rl.experience import Experience
from tasks.store import read_jsonl
from tasks.train.order import Rollouts
from tasks.types import Note, Scores, Trajectory


@dataclass(frozen=True)
class Recorder:
    """Writes one file per step, so that a step that is repeated after a restart overwrites its own file.

    Attributes:
        folder: of the files.
        count: trajectories of a step, at most.
        tokenizer: decodes tokens for the viewer.
        seed: of the run.
    """

    folder: Path
    count: int
    tokenizer: Any
    seed: int

    def write(self, step: int, rollouts: Rollouts, rows: Sequence[int], experience: Experience) -> None:
        """Record the first trajectories that were learned from; see `learned_trajectories`."""
        learned = learned_trajectories(rollouts, rows, experience)[: self.count]
        recorded = [
            trajectory_row(
                trajectory,
                rollouts.questions[trajectory.question_id],
                policy="",
                seed=self.seed,
                mode="sampled",
                step=step,
                tokenizer=self.tokenizer,
                scores=scores,
                advantages=advantages,
            )
            for trajectory, scores, advantages in learned
        ]
        if recorded:
            schema.write(self.folder / f"{step:08d}.jsonl", recorded)

    def read(self) -> list[dict[str, Any]]:
        """All recorded rows, by step."""
        return [row for path in sorted(self.folder.glob("*.jsonl")) for _, row in read_jsonl(path)]


def learned_trajectories(
    rollouts: Rollouts, rows: Sequence[int], experience: Experience
) -> list[tuple[Trajectory, Scores, list[float]]]:
    """Trajectories whose samples were learned from, with the rewards and advantages of these samples on their tokens.

    Args:
        rollouts: of a step.
        rows: numbers of the samples that were learned from, in the order of the experience.
        experience: with advantages.
    """
    assert experience.advantages is not None
    samples_of: dict[int, list[tuple[int, int]]] = {}  # Trajectory -> (sample, its row of the experience).
    for row, i in enumerate(rows):
        if (owner := rollouts.owners[i]) is not None:
            samples_of.setdefault(owner, []).append((i, row))

    learned = []
    for owner, of_trajectory in samples_of.items():
        trajectory = rollouts.trajectories[owner]
        advantages = [0.0] * len(trajectory.response_ids)
        placed_scores = []
        for i, row in of_trajectory:
            sample, scores = rollouts.samples[i], rollouts.scores[i]
            prefix, count = len(sample.prefix_ids), len(sample.ids)
            start = prefix - len(trajectory.prompt_ids)  # The sample's first token among the response's.
            advantages[start : start + count] = experience.advantages[row, prefix : prefix + count].tolist()
            placed = tuple((start + position, value) for position, value in scores.placed)
            placed_scores.append(replace(scores, placed=placed))
        scores = total(placed_scores)
        learned.append((trajectory, replace(scores, notes=_united(placed_scores)), advantages))
    return learned


def _united(scores: Sequence[Scores]) -> tuple[Note, ...]:
    """The notes of samples of one trajectory, each as often as the sample that has it most often.

    Samples may share notes, because each may have those of the whole trajectory; equal candidates of one turn are as
    many notes.
    """
    counts: Counter[Note] = Counter()
    for one in scores:
        counts |= Counter(one.notes)
    return tuple(counts.elements())
