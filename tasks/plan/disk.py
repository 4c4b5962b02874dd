"""How much of a disk a run takes at most: start policies, checkpoints, trained policies, data and index.

DVC keeps what it tracks in its cache, too, as a second copy unless its settings say links (`dvc config cache.type`).
Resume folders in `.scratch/work` stay after a run, with two checkpoints and the best policy of each training.
"""

from __future__ import annotations

import configparser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.plan.machine import on_one_disk
from tasks.plan.memory import MOMENTS_AND_WEIGHTS, Demand

KEPT_CHECKPOINTS = 2
LINKS = ("hardlink", "symlink")
WORK, ARTIFACTS = Path(".scratch/work"), Path("artifacts")


@dataclass(frozen=True)
class Room:
    """What a run writes: name and bytes of each kind of file."""

    items: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(size for _, size in self.items)

    def largest(self, count: int) -> list[tuple[str, int]]:
        """The largest kinds."""
        return sorted(self.items, key=lambda item: -item[1])[:count]


def room(demands: Sequence[Demand], num_seeds: int, copies: int, data: int) -> Room:
    """What a run with these systems writes at most.

    Args:
        demands: of every system that is trained; one without learner stands for a run that trains nothing.
        num_seeds: each system is made so often.
        copies: of what DVC tracks, as `copies_of` says.
        data: bytes of the questions and passages that are read.
    """
    model, teaching = demands[0].model, demands[0].teaching
    start = 4 * model.num_weights if teaching else model.stored
    states = [_state(demand) for demand in demands if demand.learner]
    policies = [demand.bytes_of * model.num_weights for demand in demands if demand.learner]
    taught = MOMENTS_AND_WEIGHTS * model.num_weights if teaching else 0

    return Room(
        (
            ("start policies", num_seeds * start * copies),
            ("trained policies", num_seeds * sum(policies) * copies),
            ("checkpoints", num_seeds * KEPT_CHECKPOINTS * (sum(states) + taught)),
            ("best policies of trainings", num_seeds * sum(policies)),
            ("what is being written", max([*states, taught]) + max(policies, default=0)),
            ("data and index", data * (copies + 1)),
        )
    )


def _state(demand: Demand) -> int:
    """A checkpoint of a training: weights and moments of policy and critic."""
    assert demand.learner is not None
    critic = demand.model.decoder_weights if demand.learner.has_critic else 0
    return MOMENTS_AND_WEIGHTS * (demand.trained + critic)


def copies_of(root: Path) -> int:
    """How many copies of a tracked file lie on the disk of the clone: 1 where DVC links, or its cache is elsewhere."""
    config = configparser.ConfigParser()
    try:
        config.read([root / ".dvc/config", root / ".dvc/config.local"], encoding="utf-8")
    except configparser.Error:
        return 2  # DVC itself says what is wrong with its settings.
    cache = dict(config["cache"]) if config.has_section("cache") else {}
    first = cache.get("type", "copy").strip("\"'").split(",")[0].strip()
    folder = root / ".dvc" / cache.get("dir", "cache").strip("\"'")
    return 1 if first in LINKS or not on_one_disk(folder, root) else 2


def size_of(folder: Path, pattern: str = "*") -> int:
    """Bytes of all files below a folder whose names fit; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.rglob(pattern) if file.is_file())


def there(root: Path, copies: int) -> int:
    """Bytes of weights that this clone already has; a run writes over them or uses them again."""
    weights = "*.safetensors"
    return size_of(root / ARTIFACTS, weights) * copies + size_of(root / WORK, weights)
