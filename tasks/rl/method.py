"""A method is a composition: grammar and prompt, sampler, rewards, filter, advantage, loss.

The parts are small objects that know nothing of one another or of the method they serve. A part says
which extra tensors it reads (`needs_values`, `needs_reference`); the loop computes those and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar
from tasks.conf import require
from tasks.rewards import Need, Reward
from tasks.rl.advantages import Advantage
from tasks.rl.filters import Filter
from tasks.rl.losses import LossSum
from tasks.rl.samplers import Sampler
from tasks.rl.simulators import Simulator
from tasks.rl.value_losses import ValueLoss


@dataclass(frozen=True)
class Method:
    """What `tasks/methods/<name>.py` builds and the training loop runs.

    Attributes:
        template: prompt with `{question}`.
        grammar: text to turns.
        sampler, rewards, filter, advantage, loss: the parts.
        value_loss: the critic's loss where the advantage needs values.
        temperature, top_p: of rollouts.
        simulator: answers searches during training in place of the search engine; None: the engine does.
    """

    template: str
    grammar: SearchGrammar
    sampler: Sampler
    rewards: tuple[Reward, ...]
    filter: Filter
    advantage: Advantage
    loss: LossSum
    value_loss: ValueLoss | None
    temperature: float
    top_p: float
    simulator: Simulator | None = None

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start policy must be held."""
        return self.advantage.needs_reference or self.loss.needs_reference or "likelihood" in self.needs

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the rewards together need."""
        return tuple(dict.fromkeys(need for reward in self.rewards for need in reward.needs))


def outcome_parts(names: Sequence[str], scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the named reward parts over trajectories that have them."""
    found = {name: [s[name] for s in scores if name in s] for name in names}
    return {f"{name}_mean": sum(v) / len(v) for name, v in found.items() if v}
