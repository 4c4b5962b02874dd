"""How far a run has come, and checkpoints from which it goes on as if it had never been cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter

from tasks import checkpoint
from tasks.agent.rollout import RolloutCost
from tasks.conf import plain
from tasks.engine import Critic, Policy
from tasks.reached import divided
from tasks.records.usage import WORK, Usage, named_by_role
from tasks.records.work import Work
from tasks.rl.method import Method
from tasks.store import DataError
from tasks.train.settings import TrainConf


@dataclass
class Progress:
    """How far a run has come. It is saved whole: what a restart needs beside tensors is a field of this class.

    Attributes:
        step: the last one that ended.
        history: reports {"step", "metrics"} in order.
        cost: of playing training questions; the player counts in this very object.
        num_trajectories, num_failed: played so far.
        num_draws: draws so far, which number the next one.
        stopped: why the run was stopped, None if it was not.
        selected_step: the step whose policy is the best so far, None where the last one is taken.
        usage: role -> what its service did in the steps so far.
        seconds: part of a step -> seconds that it took in the steps so far (`tasks.clock`); another run takes others.
        work: what the steps so far did in which seconds, likewise.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    cost: RolloutCost = field(default_factory=RolloutCost)
    num_trajectories: int = 0
    num_failed: int = 0
    num_draws: int = 0
    stopped: str | None = None
    selected_step: int | None = None
    usage: dict[str, Usage] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    work: Work = field(default_factory=Work, compare=False)

    def is_over(self, conf: TrainConf) -> bool:
        """Whether the budget is spent or the run was stopped."""
        return self.step >= conf.num_steps or conf.is_spent(self.cost.generated) or self.stopped is not None

    def is_due(self, conf: TrainConf, before: int) -> bool:
        """Whether the step that raised the number of generated tokens from `before` crossed a validation mark."""
        every = conf.validate_every_tokens
        if every and self.cost.generated:
            return self.cost.generated // every > before // every
        return self.step % conf.validate_every == 0

    def use(self, used: Mapping[str, Usage]) -> dict[str, float]:
        """Add what the services did in a step; returns its metrics."""
        for role, usage in used.items():
            self.usage.setdefault(role, Usage()).add(usage)
        return named_by_role(used, WORK)

    def spend(self, seconds: Mapping[str, float], work: Work | None = None) -> dict[str, float]:
        """Add what the parts of a step took, and what they did; returns its metrics."""
        for part, taken in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + taken
        done = work or Work()
        self.work.add(done)
        return {f"seconds/{part}": taken for part, taken in seconds.items()} | done.rates()

    def totals(self) -> dict[str, float]:
        """Metrics of all play so far."""
        cost = self.cost
        totals = {"generated_tokens": cost.generated, "prefill_tokens": cost.prefilled, "searches": cost.searches}
        return {f"{name}_total": value for name, value in totals.items()}

    def share_done(self, conf: TrainConf) -> float:
        """How far the run is, by the budget that ends it first; 0 to 1."""
        spent = self.cost.generated / conf.max_generated_tokens if conf.max_generated_tokens else 0.0
        return min(1.0, max(spent, self.step / max(conf.num_steps - 1, 1)))


_PROGRESS = TypeAdapter(Progress)


def settings_of(conf: TrainConf, method: Method, seed: int) -> dict[str, Any]:
    """What a checkpoint was made with; a run may be made longer and reach its models in another way, nothing else.

    A longer run has one validation more (at the end of the shorter one), from which its best may come.
    """
    settings, _ = divided({"train": plain(conf), "method": plain(method), "seed": seed})
    # A curriculum depends on the length of the run, so a longer run is a different run.
    if not method.search.depends_on_budget:
        del settings["train"]["num_steps"], settings["train"]["max_generated_tokens"]
    return cast(dict[str, Any], json.loads(json.dumps(settings, default=lambda part: type(part).__qualname__)))


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        folder: where they are.
        settings: what a run must have in common with a checkpoint to go on from it; see `settings_of`.
        policy, critic: engines, which write their own files.
    """

    folder: Path
    settings: dict[str, Any]
    policy: Policy
    critic: Critic | None

    def save(self, progress: Progress) -> None:
        """Write a checkpoint.

        Raises:
            OSError: it could not be written; the ones before it are untouched.
        """
        with checkpoint.writing(self.folder, progress.step) as folder:
            self.policy.save(folder / "policy")
            if self.critic is not None:
                self.critic.save(folder / "critic")
            values = {"settings": self.settings, "progress": _PROGRESS.dump_python(progress)}
            checkpoint.write_state(folder / "run", {"rng/torch": torch.get_rng_state()}, values)

    def load(self) -> Progress | None:
        """Set engines and random state to the newest sound checkpoint; None if there is none.

        Raises:
            DataError: it was made with other settings.
        """
        folder = checkpoint.latest(self.folder)
        if folder is None:
            return None
        tensors, values = checkpoint.read_state(folder / "run")
        found = values["settings"]
        differ = [name for name in {**found, **self.settings} if found.get(name) != self.settings.get(name)]
        if differ:
            raise DataError(
                f"{self.folder}: made with other settings ({', '.join(differ)}) than this run's. "
                f"Continue with those, or delete the folder to start anew."
            )
        self.policy.load(folder / "policy")
        if self.critic is not None:
            self.critic.load(folder / "critic")
        torch.set_rng_state(tensors["rng/torch"])
        return _PROGRESS.validate_python(values["progress"])
