"""Methods: `conf/method/<name>.yaml` names the parts a method is made of, and their numbers.

`load` resolves such a file: whatever it names stands by value in the result, prompts and services included. `build`
makes the parts from that result alone and reads no configuration. Rules between parts are in `tasks.rl.method.Method`.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import conf, extends, parts, services
from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import Tree
from tasks.rl.losses import LossSum
from tasks.rl.method import Method
from tasks.services import Kind, Role

OWN = ("title", "paper_rows")
"""Keys that say what a file stands for: no other file takes them over, and no result depends on them."""


@dataclass(frozen=True)
class SamplingConf:
    """How rollouts are drawn; `Method` has the bounds."""

    temperature: float
    top_p: float


@dataclass(frozen=True)
class MethodFile:
    """The keys of a file of `conf/method/`, beside `extends` and `scales`.

    Attributes:
        title: in tables.
        prompt: a file of `conf/prompt/`.
        grammar, sampler, filter, advantage, search: parts, each with its `kind`.
        rewards, losses: kind -> numbers, added up in order; null takes an inherited one away.
        value_loss: the part that trains the critic where the advantage needs one, else null.
        sampling: of rollouts.
        services: role -> a file of `conf/service/`, for each role that the parts call; null takes one away.
        train, rollout: changes to the sections of `conf/scale/<name>.yaml`.
        paper_rows: [method, variant] pairs under which the papers print it.
    """

    title: str
    prompt: str
    grammar: dict[str, Any]
    sampler: dict[str, Any]
    rewards: dict[str, dict[str, Any] | None]
    filter: dict[str, Any]
    advantage: dict[str, Any]
    losses: dict[str, dict[str, Any] | None]
    value_loss: dict[str, Any] | None
    sampling: SamplingConf
    search: dict[str, Any] = field(default_factory=lambda: {"kind": "index"})
    services: dict[str, str | None] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    paper_rows: tuple[tuple[str, ...], ...] = ()


def load(
    name: str,
    scale: str,
    root: Path = Path("."),
    prompt: Prompt | None = None,
    grammar: SearchGrammar | None = None,
) -> Tree:
    """Resolve and check `conf/method/<name>.yaml`.

    Args:
        name: file name without suffix.
        scale: picks the file's `scales` entry.
        root: root of the clone.
        prompt, grammar: replace the method's (a model that cannot read instructions brings its own).

    Returns:
        What `build` takes, ready for JSON, with `name`, `title`, `paper_rows`, and the changes `train` and `rollout`.

    Raises:
        ValueError: unknown file, key or kind, a value out of bounds, or parts that do not go together.
    """
    where = str(conf.path_of("method", name, root))
    file = conf.fill(MethodFile, extends.read("method", name, scale, root, OWN), where)
    own_prompt = prompts.load(file.prompt, where, root)
    own_grammar = grammars.make(file.grammar, None, f"{where}: grammar")
    rewards = parts.make_each("rewards", file.rewards, f"{where}: rewards")
    terms = parts.make_each("rl.losses", file.losses, f"{where}: losses")

    tree: Tree = conf.plain(file) | {
        "name": name,
        "prompt": conf.plain(prompt or own_prompt),
        "grammar": parts.plain(grammar or own_grammar),
        "rewards": [parts.plain(reward) for reward in rewards],
        "losses": [parts.plain(term) for term in terms],
        "services": {role: parts.plain(kind) for role, kind in _services(file.services, where, root).items()},
    }
    return {**tree, **_plain(build(tree, None, where))}


def build(tree: Mapping[str, Any], tokenizer: Any, where: str = "the resolved method") -> Method:
    """The method that `load` resolved, for one tokenizer; None leaves the grammar without one.

    Raises:
        ValueError: as `load`; starts with `where`.
    """
    value_loss, sampling = tree["value_loss"], conf.fill(SamplingConf, tree["sampling"], f"{where}: sampling")
    made: dict[str, Any] = {
        "prompt": conf.fill(Prompt, tree["prompt"], f"{where}: prompt"),
        "grammar": grammars.make(tree["grammar"], tokenizer, f"{where}: grammar"),
        "sampler": parts.make("rl.samplers", tree["sampler"], f"{where}: sampler"),
        "rewards": tuple(parts.make("rewards", one, f"{where}: rewards") for one in tree["rewards"]),
        "filter": parts.make("rl.filters", tree["filter"], f"{where}: filter"),
        "advantage": parts.make("rl.advantages", tree["advantage"], f"{where}: advantage"),
        "value_loss": value_loss and parts.make("rl.value_losses", value_loss, f"{where}: value_loss"),
        "search": parts.make("rl.search", tree["search"], f"{where}: search"),
        "services": {
            role: parts.make("services", kind, f"{where}: services: {role}") for role, kind in tree["services"].items()
        },
    }
    terms = tuple(parts.make("rl.losses", term, f"{where}: losses") for term in tree["losses"])
    try:
        return Method(loss=LossSum(terms), temperature=sampling.temperature, top_p=sampling.top_p, **made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def composition(tree: Tree) -> Tree:
    """The resolved parts alone, without names and budgets."""
    others = ("name", *OWN, "train", "rollout")
    return {key: value for key, value in tree.items() if key not in others}


def _plain(method: Method) -> Tree:
    """Settings of the single parts, in which every field is given."""
    made = {key: getattr(method, key) for key in ("sampler", "filter", "advantage", "search", "value_loss")}
    return {key: None if part is None else parts.plain(part) for key, part in made.items()}


def _services(names: Mapping[str, str | None], where: str, root: Path) -> dict[Role, Kind]:
    """The service that plays each role."""
    known = typing.get_args(Role)
    kinds: dict[Role, Kind] = {}
    for role, name in names.items():
        place = f"{where}: services: {role}"
        if role not in known:
            raise ValueError(f"{place}: unknown role {role!r}. Known: {', '.join(known)}.")
        if name is not None:
            conf.path_of("service", name, root, place)
            kinds[typing.cast(Role, role)] = services.load(typing.cast(Role, role), name, root)
    return kinds
