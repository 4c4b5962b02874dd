"""Methods: `build` makes the parts of a method from a resolved description and reads no configuration.

`tasks.methods.loader` resolves a file of `conf/method/` into such a description: prompts, services and every other file
that it names are replaced by their contents. `tasks.rl.method.Method` checks that the parts fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from tasks import conf, parts
from tasks.agent import grammars
from tasks.agent.prompts import Prompt
from tasks.conf import Tree
from tasks.rewards import Reward
from tasks.rl.advantages import Advantage
from tasks.rl.filters import Filter
from tasks.rl.losses import LossSum, LossTerm
from tasks.rl.method import Method
from tasks.rl.samplers import Sampler
from tasks.rl.search import Search
from tasks.rl.value_losses import ValueLoss

OWN = ("title", "paper_rows")
"""Keys that describe the file itself: a file that extends it does not inherit them, and no result depends on them."""
PROTOCOLS: dict[str, type] = {
    "rewards": Reward,
    "sampler": Sampler,
    "filter": Filter,
    "advantage": Advantage,
    "losses": LossTerm,
    "value_loss": ValueLoss,
    "search": Search,
}
"""What each part must have; without this check a stage would find out after minutes."""


@dataclass(frozen=True)
class SamplingConf:
    """How tokens are drawn in rollouts; temperature 0 is greedy."""

    temperature: Annotated[float, Field(ge=0, le=100)]
    top_p: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Resolved:
    """The keys of a resolved description that `build` takes; each part has its `kind`."""

    prompt: Prompt
    grammar: Tree
    sampler: Tree
    rewards: tuple[Tree, ...]
    filter: Tree
    advantage: Tree
    losses: tuple[Tree, ...]
    value_loss: Tree | None
    sampling: SamplingConf
    search: Tree
    services: dict[str, Tree]


def build(tree: Mapping[str, Any], tokenizer: Any, where: str = "the resolved method") -> Method:
    """The method that `load` resolved. Its grammar is fitted to the tokenizer; None leaves it as it is.

    Raises:
        ValueError: as `load`; starts with `where`.
    """
    found = conf.fill(Resolved, composition(tree), where)
    value_loss = found.value_loss
    made: dict[str, Any] = {
        "prompt": found.prompt,
        "grammar": grammars.make(found.grammar, tokenizer, f"{where}: grammar"),
        "sampler": parts.make("rl.samplers", found.sampler, f"{where}: sampler"),
        "rewards": tuple(parts.make("rewards", reward, f"{where}: rewards") for reward in found.rewards),
        "filter": parts.make("rl.filters", found.filter, f"{where}: filter"),
        "advantage": parts.make("rl.advantages", found.advantage, f"{where}: advantage"),
        "value_loss": value_loss and parts.make("rl.value_losses", value_loss, f"{where}: value_loss"),
        "search": parts.make("rl.search", found.search, f"{where}: search"),
        "services": {
            role: parts.make("services", kind, f"{where}: services: {role}") for role, kind in found.services.items()
        },
    }
    terms = tuple(parts.make("rl.losses", term, f"{where}: losses") for term in found.losses)
    for name, protocol in PROTOCOLS.items():
        made_of = {"rewards": made["rewards"], "losses": terms}.get(name, (made.get(name),))
        for part in (one for one in made_of if one is not None):
            parts.check_members(part, protocol, f"{where}: {name}")
    _require_own_components(made["rewards"], f"{where}: rewards")
    try:
        return Method(loss=LossSum(terms), temperature=found.sampling.temperature, top_p=found.sampling.top_p, **made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _require_own_components(rewards: Sequence[Reward], where: str) -> None:
    """Refuse two rewards with a component of one name: metrics and filters would read the second alone."""
    givers: dict[str, Reward] = {}
    for reward in rewards:
        for name in reward.components:
            if (other := givers.setdefault(name, reward)) is not reward:
                raise ValueError(
                    f"{where}: {parts.kind_of(reward)}: component {name!r} is one of {parts.kind_of(other)}, too. Give "
                    f"yours another name; mend {parts.file_of(type(reward))}."
                )


def composition(tree: Mapping[str, Any]) -> Tree:
    """The resolved parts without names and budgets."""
    others = ("name", *OWN, "start", "tool_reader", "train", "rollout")
    return {key: value for key, value in tree.items() if key not in others}
