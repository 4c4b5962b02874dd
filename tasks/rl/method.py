"""A method is a composition: grammar and prompt, sampler, rewards, filter, advantage, loss.

The parts are small objects that know nothing of one another or of the method they serve. A part says
which extra tensors it reads (`needs_values`, `needs_reference`); the loop computes those and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.rewards import Field, Reward
from tasks.rl.advantages import Advantage
from tasks.rl.filters import Filter
from tasks.rl.losses import LossSum
from tasks.rl.samplers import Sampler
from tasks.rl.search import Search
from tasks.rl.value_losses import ValueLoss
from tasks.services import Kind, Role, check_role


@dataclass(frozen=True)
class Method:
    """What `tasks/methods/<name>.py` builds and the training loop runs.

    Attributes:
        prompt: instructions around the question.
        grammar: text to turns.
        sampler, rewards, filter, advantage, loss: the parts.
        value_loss: the critic's loss where the advantage needs values.
        temperature, top_p: of rollouts.
        search: who answers the searches of training.
        services: which service plays each role that the parts call.
    """

    prompt: Prompt
    grammar: SearchGrammar
    sampler: Sampler
    rewards: tuple[Reward, ...]
    filter: Filter
    advantage: Advantage
    loss: LossSum
    value_loss: ValueLoss | None
    temperature: float
    top_p: float
    search: Search
    services: Mapping[Role, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_services()
        require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start policy must be held."""
        return self.advantage.needs_reference or self.loss.needs_reference or self._services_need_reference

    @property
    def reads(self) -> tuple[Field, ...]:
        """What the rewards together read of a question."""
        return tuple(dict.fromkeys(name for reward in self.rewards for name in reward.reads))

    @property
    def _services_need_reference(self) -> bool:
        return any(kind.needs_reference for kind in self.services.values())

    def _check_services(self) -> None:
        """Every role that a part calls is played by one service of that role, and no other service is named."""
        callers: tuple[Reward | Search, ...] = (*self.rewards, self.search)
        called = {role: type(part).__name__ for part in callers for role in part.services}
        for role, caller in called.items():
            if role not in self.services:
                raise ValueError(
                    f"services: nobody plays {role}, which {caller} calls. Add {role}: and the name of a file of "
                    "conf/service/ whose kind plays that role."
                )
        for role, kind in self.services.items():
            if role not in called:
                raise ValueError(f"services: {role} is named, but no part of this method calls it. Remove it.")
            check_role(role, kind, f"services: {role}")


def outcome_parts(names: Sequence[str], scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the named reward parts over trajectories that have them."""
    found = {name: [s[name] for s in scores if name in s] for name in names}
    return {f"{name}_mean": sum(v) / len(v) for name, v in found.items() if v}
