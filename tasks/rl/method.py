"""A method is a composition: prompt and grammar, sampler, rewards, filter, advantage, losses.

The parts are small objects that know nothing of one another or of the method they serve. A part says which extra
tensors it reads (`needs_values`, `needs_reference`), and the loop computes only those. Whether the parts of a method
fit together is checked here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks import parts
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
    """What `tasks.methods` builds and the training loop runs.

    Attributes:
        prompt: instructions around the question.
        grammar: reads turns from text and renders observations.
        sampler, rewards, filter, advantage, loss: the parts that say what is drawn, how it is rewarded, which groups
            are kept, how a sample compares with others, and what is minimised.
        value_loss: the critic's loss where the advantage needs values.
        temperature, top_p: of rollouts.
        search: which search engine answers during training.
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
        require(bool(self.rewards), "rewards", {}, "at least one")
        self._check_critic()
        self._check_groups()
        self._check_filter()
        self._check_services()
        self._check_heads()
        self._check_evidence()

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start policy must be held."""
        return self.advantage.needs_reference or self.loss.needs_reference or self._services_need_reference

    @property
    def reads(self) -> tuple[Field, ...]:
        """What the rewards and the services together read of a question."""
        read = [name for reward in self.rewards for name in reward.reads]
        # Most services read nothing of a question but what a reward hands them, and have no such field.
        read += [name for kind in self.services.values() for name in getattr(kind, "reads", ())]
        return tuple(dict.fromkeys(read))

    @property
    def _services_need_reference(self) -> bool:
        return any(kind.needs_reference for kind in self.services.values())

    def _check_critic(self) -> None:
        """A critic is trained where the advantage reads its values, and only there."""
        is_needed = self.advantage.needs_values
        expected = "a part: the advantage needs a critic" if is_needed else "null: the advantage needs no critic"
        require((self.value_loss is not None) == is_needed, "value_loss", self.value_loss, expected)

    def _check_groups(self) -> None:
        """Members of a group can be compared only where there are two or more and they can differ."""
        if self.advantage.compares_group or self.filter.compares_group:
            require(self.sampler.size > 1, "sampler: size", self.sampler.size, "at least 2, which are compared")
            expected = "above 0: members that are alike teach nothing"
            require(self.temperature > 0, "sampling: temperature", self.temperature, expected)

    def _check_filter(self) -> None:
        """Every component of the scores that the filter reads comes from a reward of this method."""
        given = [name for reward in self.rewards for name in reward.components]
        for name in self.filter.components:
            require(name in given, "filter: component", name, f"one that a reward gives: {', '.join(given)}")

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

    def _check_heads(self) -> None:
        """A reward model's number means what the reward takes it for; the opposite would reward what is wrong."""
        for reward in self.rewards:
            if "reward_model" in reward.services:
                # Only these rewards, and services of that role, have such a field.
                given, needed = getattr(self.services["reward_model"], "head", None), getattr(reward, "head", None)
                expected = f"{needed!r}, which {type(reward).__name__} reads. Name another file of conf/service/"
                require(given == needed, "services: reward_model: head", given, expected)

    def _check_evidence(self) -> None:
        """Evidence is paid only where prompt and grammar ask for it; else it would be 0 for ever."""
        for reward in self.rewards:
            # Only rewards of evidence have such a field.
            if getattr(reward, "pays_evidence", False) and not self.grammar.shows_evidence:
                raise ValueError(
                    f"rewards: {parts.kind_of(reward)} pays evidence, and grammar {parts.kind_of(self.grammar)} shows "
                    "none. Expected grammar and prompt r_search, or a method without this reward."
                )


def component_means(names: Sequence[str], scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the named components, each over the scores that have it."""
    values = {name: [components[name] for components in scores if name in components] for name in names}
    return {f"{name}_mean": sum(v) / len(v) for name, v in values.items() if v}
